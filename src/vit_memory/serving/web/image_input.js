// Where images come from: a file, a drop, the clipboard, the camera, a sample.

import { byId, h } from "./elements.js";
import { SAMPLES, drawSample, sampleFile } from "./samples.js";

/** `onImage(file, note)` for every image given; `onTaskFiles(files)` for task files dropped anywhere on the page. */
export function watchImageInput({ onImage, onTaskFiles, onProblem }) {
  const take = (files) => {
    const all = [...files];
    const taskFiles = all.filter((file) => file.name.endsWith(".safetensors"));
    const images = all.filter((file) => !taskFiles.includes(file));
    if (taskFiles.length) onTaskFiles(taskFiles);
    if (images.length) onImage(images[0], images.length > 1 ? `The first of ${images.length} files is shown.` : "");
  };
  const input = byId("image-file");
  input.addEventListener("change", () => {
    take(input.files);
    input.value = ""; // the same file can be chosen again
  });
  byId("choose-image").addEventListener("click", () => input.click());
  watchDrops(take);
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return; // text is pasted where it was meant to go
    event.preventDefault();
    take(files);
  });
  offerSamples(onImage);
  offerCamera(onImage, onProblem);
}

function watchDrops(take) {
  const stage = byId("stage");
  let leaving = null;
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  window.addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    clearTimeout(leaving);
    stage.classList.add("dropping");
    leaving = setTimeout(() => stage.classList.remove("dropping"), 200); // dragover repeats while a file is above
  });
  window.addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    stage.classList.remove("dropping");
    take(event.dataTransfer.files);
  });
}

function offerSamples(onImage) {
  const buttons = SAMPLES.map((sample) =>
    h(
      "button",
      {
        type: "button",
        class: "sample",
        "aria-label": sample.label,
        title: sample.label,
        "data-sample": sample.name,
        click: async () => onImage(await sampleFile(sample), ""),
      },
      drawSample(sample),
    ),
  );
  byId("samples").replaceChildren(...buttons.map((button) => h("li", {}, button)));
}

async function offerCamera(onImage, onProblem) {
  const button = byId("take-picture");
  const media = navigator.mediaDevices; // absent where the page came over plain HTTP from another machine
  const devices = media?.enumerateDevices ? await media.enumerateDevices().catch(() => []) : [];
  if (devices.some((device) => device.kind === "videoinput")) {
    button.hidden = false;
    button.addEventListener("click", () => openCamera(media, onImage, onProblem));
  } else if (matchMedia("(pointer: coarse)").matches) {
    const input = byId("camera-file"); // phones open their own camera for it, also without a secure connection
    button.hidden = false;
    button.addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      if (input.files.length) onImage(input.files[0], "");
      input.value = "";
    });
  }
}

async function openCamera(media, onImage, onProblem) {
  const dialog = byId("camera");
  const video = byId("camera-video");
  const shutter = byId("camera-shutter");
  let stream;
  try {
    stream = await media.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } }, audio: false });
  } catch (error) {
    const denied = error.name === "NotAllowedError";
    onProblem("The camera is not available", denied ? "The browser was not allowed to use it." : error.message);
    return;
  }
  shutter.disabled = true; // until there is a picture to take
  video.addEventListener("loadeddata", () => (shutter.disabled = false), { once: true });
  video.srcObject = stream;
  const shoot = () => {
    const canvas = h("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob((blob) => onImage(new File([blob], "camera.jpg", { type: "image/jpeg" }), ""), "image/jpeg", 0.92);
    dialog.close();
  };
  shutter.addEventListener("click", shoot);
  dialog.addEventListener(
    "close",
    () => {
      for (const track of stream.getTracks()) track.stop();
      video.srcObject = null;
      shutter.removeEventListener("click", shoot);
    },
    { once: true },
  );
  dialog.showModal();
}
