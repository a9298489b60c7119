// Which part of an image the backbone sees: the patches of an explanation lie there, and not on the whole image.

/** How a task's images are prepared; a task that does not say it is prepared for as the backbone is. */
export function preprocessingOf(task, backbone) {
  const [height, width] = backbone.image_size ?? [];
  const usual = height ? { resize: Math.min(height, width), crop: [height, width] } : null;
  return task.preprocessing ?? backbone.preprocessing ?? usual;
}

/**
 * The part of a (width, height) image that remains after the resize and the centre crop of a task's preprocessing, as
 * shares of the image: {left, top, width, height}.
 */
export function seenPart(preprocessing, width, height) {
  const whole = { left: 0, top: 0, width: 1, height: 1 };
  const crop = preprocessing?.crop;
  if (!crop || !width || !height) return whole;
  const resize = preprocessing.resize;
  let [resizedHeight, resizedWidth] = [height, width];
  if (Array.isArray(resize)) [resizedHeight, resizedWidth] = resize;
  else if (resize) {
    const scale = resize / Math.min(width, height);
    [resizedHeight, resizedWidth] = [height * scale, width * scale];
  }
  const part = { height: Math.min(1, crop[0] / resizedHeight), width: Math.min(1, crop[1] / resizedWidth) };
  return { ...part, left: (1 - part.width) / 2, top: (1 - part.height) / 2 };
}
