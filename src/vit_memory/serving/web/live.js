// What a pass costs and how the server is doing, asked for every two seconds while the page is visible.

import { byId, h, setText, styled } from "./elements.js";
import { count, grouped, listed, milliseconds, times } from "./text.js";

const EVERY_MS = 2000;

/** Ask for the status again and again; `onVersion` hears of the version, `onLost` whether the server answers. */
export class LiveStatus {
  constructor(server, { onVersion, onLost }) {
    this.server = server;
    this.onVersion = onVersion;
    this.onLost = onLost;
    this.served = { tasks: 0, branches: 0 }; // how many
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.start());
  }

  start() {
    clearTimeout(this.timer);
    if (!document.hidden) this.ask();
  }

  async ask() {
    clearTimeout(this.timer);
    try {
      const status = await this.server.status();
      this.onLost(false);
      this.render(status);
      this.onVersion(status.version);
    } catch (problem) {
      this.onLost(problem.status === 0);
    }
    clearTimeout(this.timer); // of a request beside this one
    if (!document.hidden) this.timer = setTimeout(() => this.ask(), EVERY_MS);
  }

  render(status) {
    setText(byId("live-queue"), grouped(status.waiting));
    setText(byId("live-answered"), grouped(status.answered));
    setText(byId("live-batch"), status.passes ? (status.images / status.passes).toFixed(1) : "–");
    this.cost = status.cost;
    this.renderCost();
  }

  /** Bars: the plain backbone, this pass, and a model for every task. */
  renderCost({ tasks, branches } = this.served) {
    this.served = { tasks, branches };
    const separate = tasks + 1;
    const extra = branches ? [count(branches, "branch", "branches")] : [];
    const rows = [
      { name: "the backbone alone", factor: 1, style: "plain" },
      {
        name: `this pass: ${listed([count(tasks, "task"), ...extra, "the original output"])}`,
        factor: this.cost ?? null,
        style: "ours",
      },
      { name: `${count(tasks, "model")} of their own, and the original`, factor: separate, style: "apart" },
    ];
    const longest = Math.max(separate, this.cost ?? 1);
    byId("cost-bars").replaceChildren(
      ...rows.map((row) =>
        h(
          "li",
          { class: row.style },
          h("span", { class: "label" }, row.name),
          h("span", { class: "share" }, row.factor === null ? "not measured yet" : times(row.factor)),
          row.factor === null
            ? null
            : styled(h("span", { class: "bar", "aria-hidden": "true" }), { "--share": row.factor / longest }),
        ),
      ),
    );
  }

  /** The time of the last answer, by stage. */
  renderAnswer(image, seconds) {
    setText(byId("live-time"), milliseconds(1000 * seconds));
    const stages = Object.entries(image.stages_ms).map(([name, value]) => `${name} ${milliseconds(value)}`);
    setText(byId("live-stages"), listed(stages));
    setText(byId("live-shared"), image.batch === 1 ? "alone in its pass" : `with ${image.batch - 1} more in its pass`);
  }
}
