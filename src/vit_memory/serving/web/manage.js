// Tasks on the server: listed, downloaded, added, removed.

import { byId, h, setText } from "./elements.js";
import { inWords } from "./server.js";
import { inOrder, readTaskFile } from "./task_file.js";
import { bytes, count, describeTask } from "./text.js";

/** The list of tasks and the form that changes it; `changed(message)` after each change. */
export class TaskManager {
  constructor(server, { changed }) {
    this.server = server;
    this.changed = changed;
    this.catalogue = null;
    this.chosen = [];
    const input = byId("task-files");
    input.addEventListener("change", () => {
      this.takeFiles([...input.files]);
      input.value = "";
    });
    byId("choose-task-files").addEventListener("click", () => input.click());
    byId("add-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.add();
    });
    byId("admin-token").addEventListener("input", (event) => (this.server.adminToken = event.target.value || null));
  }

  /** Show what the server has now. */
  render(catalogue) {
    this.catalogue = catalogue;
    byId("add-form").hidden = catalogue.read_only;
    byId("read-only").hidden = !catalogue.read_only;
    byId("not-kept").hidden = catalogue.read_only || catalogue.persistent !== false;
    byId("no-tasks").hidden = catalogue.tasks.length > 0;
    byId("task-list").replaceChildren(
      ...catalogue.tasks.map((task) =>
        this.row("tasks", task, [describeTask(task), task.method, bytes(task.size_bytes)].join(" · ")),
      ),
      ...catalogue.branches.map((branch) => this.row("branches", branch, describeBranch(branch, catalogue.backbone))),
    );
    this.renderChosen();
  }

  row(what, item, description) {
    const label = what === "tasks" ? item.name : `branch ${item.name}`;
    const remove = h(
      "button",
      {
        type: "button",
        class: "plain danger",
        "aria-label": `Remove ${label}`,
        click: () => this.confirmRemoval(what, item),
      },
      "Remove",
    );
    return h(
      "li",
      { "data-name": item.name },
      h("span", { class: "title" }, label),
      h("span", { class: "details" }, description),
      h(
        "span",
        { class: "actions" },
        h(
          "button",
          { type: "button", class: "plain", "aria-label": `Download ${label}`, click: () => this.download(what, item) },
          "Download",
        ),
        this.catalogue.read_only ? null : remove,
      ),
    );
  }

  // ------------------------------------------------------------------------------------------------------------ adding

  /** Files chosen or dropped: show what they are; nothing is sent yet. */
  async takeFiles(files) {
    this.say("");
    this.chosen = [];
    for (const file of files) {
      try {
        this.chosen.push(await readTaskFile(file));
      } catch (error) {
        this.say(error.message, true);
      }
    }
    this.renderChosen();
    if (this.chosen.length) byId("add-task").focus();
    byId("add-form").scrollIntoView({ block: "nearest" });
  }

  renderChosen() {
    byId("chosen-files").replaceChildren(
      ...this.chosen.map((item) => {
        const known = this.known(item);
        const details = item.what === "tasks" ? describeTask(item) : "a branch";
        return h(
          "li",
          {},
          h("b", {}, item.name),
          ` ${details}, ${bytes(item.file.size)}`,
          known ? h("span", { class: "warn" }, " replaces the one on the server") : null,
        );
      }),
    );
    const button = byId("add-task");
    button.disabled = !this.chosen.length;
    setText(button, this.chosen.length > 1 ? `Add ${this.chosen.length} files` : "Add to the server");
  }

  known(item) {
    return this.catalogue?.[item.what].find((other) => other.name === item.name) ?? null;
  }

  async add() {
    const form = byId("add-form");
    form.setAttribute("aria-busy", "true");
    byId("add-task").disabled = true;
    try {
      while (this.chosen.length) {
        const [item] = inOrder(this.chosen);
        await this.server.put(item.what, item.name, item.file, this.known(item)?.digest ?? null);
        this.chosen = this.chosen.filter((other) => other !== item);
        await this.changed();
        this.say(`${item.name} was added.`);
      }
    } catch (problem) {
      this.fail(problem);
    } finally {
      form.removeAttribute("aria-busy");
      this.renderChosen();
    }
  }

  // -------------------------------------------------------------------------------------------- removing, downloading

  confirmRemoval(what, item) {
    const dialog = byId("removal");
    setText(byId("removal-title"), `Remove ${what === "tasks" ? "" : "branch "}${item.name}?`);
    setText(
      byId("removal-text"),
      this.catalogue.persistent === false
        ? "It stops answering at once. This server keeps its tasks in memory only: to add it again, download it first."
        : "It stops answering at once, and the server deletes its file. To add it again, download it first.",
    );
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        if (dialog.returnValue === "remove") this.remove(what, item);
      },
      { once: true },
    );
    dialog.showModal();
  }

  async remove(what, item) {
    try {
      await this.server.remove(what, item.name, item.digest);
      await this.changed();
      this.say(`${item.name} was removed.`);
      byId("task-list").focus({ preventScroll: true }); // its button is gone, and the focus must not be lost with it
    } catch (problem) {
      this.fail(problem);
    }
  }

  async download(what, item) {
    try {
      const url = URL.createObjectURL(await this.server.file(what, item.name));
      const file = what === "tasks" ? `${item.name}.safetensors` : `${item.name}.branch.safetensors`;
      h("a", { href: url, download: file }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    } catch (problem) {
      this.fail(problem);
    }
  }

  fail(problem) {
    this.say(inWords(problem), true);
    if (problem.status === 401 || problem.status === 403) byId("admin-token").focus();
  }

  say(text, bad = false) {
    const place = byId("manage-message");
    place.classList.toggle("bad", bad);
    setText(place, text);
  }
}

function describeBranch(branch, backbone) {
  return [`the last ${branch.blocks} of ${count(backbone.depth, "block")}`, bytes(branch.size_bytes)].join(" · ");
}
