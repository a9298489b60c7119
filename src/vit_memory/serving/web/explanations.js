// Explanations by image and task: asked for when a task is chosen, and kept, since visitors go back and forth.

const KEPT = 50;

export class Explanations {
  constructor(server) {
    this.server = server;
    this.kept = new Map();
  }

  /** The explanation of a task for an image, if it is here. */
  get(image, task) {
    return (image && task && this.kept.get(keyOf(image, task))) ?? null;
  }

  /** The same, from the server if need be. */
  async ask(image, task) {
    if (!this.get(image, task)) {
      const answer = await this.server.predict(image.file, { tasks: [task.name], explain: [task.name] });
      if (this.kept.size >= KEPT) this.kept.clear();
      this.kept.set(keyOf(image, task), answer.images[0].explanations[task.name]);
    }
    return this.get(image, task);
  }
}

/** With the preprocessing, which the digest does not cover: it decides what the task sees of the image. */
function keyOf(image, task) {
  return `${image.number} ${task.name} ${task.digest} ${JSON.stringify(task.preprocessing)}`;
}
