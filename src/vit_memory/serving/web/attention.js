// Where a task's class token looked: patches over the image, and for every block how its attention is divided.

import { byId, h, setText, styled, svg } from "./elements.js";
import { preprocessingOf, seenPart } from "./crop.js";
import { listed, percent } from "./text.js";

const CHART = { width: 320, height: 84, gap: 3 };

/** The parts of the attention in one block, in a fixed order; together they are one. */
export function attentionParts(block) {
  const patches = block.patches.reduce((sum, share) => sum + share, 0);
  const parts = [
    { key: "patches", name: "the image’s patches", share: patches },
    { key: "originals", name: "the original class token", share: block.originals },
    { key: "itself", name: "itself", share: block.itself },
    { key: "memory", name: "its memory cells", share: block.memory },
  ];
  for (const [name, share] of Object.entries(block.ancestors)) {
    parts.push({
      key: "parents",
      name: `${name}, which it extends`,
      share: share + (block.ancestor_memory[name] ?? 0),
    });
  }
  return parts;
}

/** Shows one explanation at a time; the visitor moves through the blocks. */
export class AttentionView {
  constructor({ onClose }) {
    this.explanation = null;
    this.block = 0;
    this.slider = byId("block");
    this.slider.addEventListener("input", () => this.explanation && this.showBlock(Number(this.slider.value) - 1));
    byId("picture").addEventListener("load", (event) => {
      const { naturalWidth, naturalHeight } = event.target;
      styled(byId("frame"), { "--ratio": naturalWidth / naturalHeight || 1 });
      this.paint();
    });
    byId("overlay-on").addEventListener("change", () => this.paint());
    byId("close-attention").addEventListener("click", onClose);
    new ResizeObserver(() => this.paint()).observe(byId("picture"));
  }

  /** An answer is under way: what is shown of another image or task stays, dimmed, but not over the image. */
  wait(task) {
    if (!task) return this.show(null, null);
    this.explanation = null;
    byId("attention").hidden = false;
    byId("attention").setAttribute("aria-busy", "true");
    setText(byId("attention-title"), `Where ${task.name} looked`);
    return this.paint();
  }

  /** `explanation` null hides everything; `message` says why there is none. */
  show(task, explanation, { backbone = null, message = "" } = {}) {
    if (explanation?.blocks.some((block) => block.itself === null)) {
      [explanation, message] = [
        null,
        "Its attention is not a number: this task is broken. The others are not affected.",
      ];
    }
    this.task = task;
    this.backbone = backbone;
    this.explanation = explanation;
    byId("attention").hidden = !task;
    byId("attention").removeAttribute("aria-busy");
    if (task) setText(byId("attention-title"), `Where ${task.name} looked`);
    setText(byId("attention-message"), message);
    byId("attention-body").hidden = !explanation;
    if (explanation) {
      const blocks = explanation.blocks.length;
      this.slider.max = blocks;
      styled(byId("attention-body"), { "--blocks": blocks });
      this.block = Math.min(this.moved ? this.block : blocks - 1, blocks - 1);
      this.slider.value = this.block + 1;
      this.drawChart();
      this.showBlock(this.block, true);
    } else this.paint();
  }

  showBlock(block, silent = false) {
    if (!silent) this.moved = true; // from then on the visitor's block is kept from task to task
    this.block = block;
    const { blocks } = this.explanation;
    const parts = attentionParts(blocks[block]);
    setText(byId("block-number"), `${block + 1} of ${blocks.length}`);
    const spoken = parts.map((part) => `${part.name} ${percent(part.share)}`);
    this.slider.setAttribute("aria-valuetext", `Block ${block + 1} of ${blocks.length}: ${listed(spoken)}`);
    this.slider.value = block + 1;
    byId("shares").replaceChildren(
      ...parts.map((part) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, h("i", { class: `swatch ${part.key}` }), part.name),
          h("td", {}, percent(part.share)),
        ),
      ),
    );
    for (const column of byId("chart").querySelectorAll("g")) {
      column.classList.toggle("current", Number(column.dataset.block) === block);
    }
    this.paint();
  }

  drawChart() {
    const { blocks } = this.explanation;
    const step = CHART.width / blocks.length;
    const width = Math.max(2, step - CHART.gap);
    const columns = blocks.map((block, i) => {
      let top = 0;
      const pieces = attentionParts(block).map((part) => {
        const height = part.share * CHART.height;
        const piece = svg("rect", { x: i * step + CHART.gap / 2, y: top, width, height, class: part.key });
        top += height;
        return piece;
      });
      const target = svg("rect", { x: i * step, y: 0, width: step, height: CHART.height, class: "target" });
      const mark = svg("rect", {
        x: i * step + CHART.gap / 2,
        y: CHART.height + 3,
        width,
        height: 4,
        rx: 2,
        class: "mark",
      });
      return svg("g", { "data-block": i, click: () => this.explanation && this.showBlock(i) }, pieces, mark, target);
    });
    byId("chart").setAttribute("viewBox", `0 0 ${CHART.width} ${CHART.height + 8}`);
    byId("chart").replaceChildren(...columns);
  }

  /** Draw the patches of the current block over the part of the image that the backbone saw. */
  paint() {
    const canvas = byId("overlay");
    const picture = byId("picture");
    const shown = Boolean(this.explanation) && byId("overlay-on").checked && picture.naturalWidth > 0;
    byId("stage").classList.toggle("overlaid", shown);
    canvas.hidden = !shown;
    if (!shown) return;
    const part = seenPart(preprocessingOf(this.task, this.backbone), picture.naturalWidth, picture.naturalHeight);
    const shares = Object.entries(part).map(([name, share]) => [`--${name}`, String(share)]);
    styled(byId("frame"), Object.fromEntries(shares));
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    canvas.width = Math.round(picture.clientWidth * part.width * ratio);
    canvas.height = Math.round(picture.clientHeight * part.height * ratio);
    const { patches } = this.explanation.blocks[this.block];
    const highest = Math.max(...patches) || 1;
    drawPatches(canvas, patches, this.explanation.grid, highest);
    setText(byId("scale-top"), percent(highest));
  }
}

function drawPatches(canvas, patches, [rows, columns], highest) {
  const context = canvas.getContext("2d");
  const [height, width] = [canvas.height / rows, canvas.width / columns];
  patches.forEach((share, i) => {
    const [row, column] = [Math.floor(i / columns), i % columns];
    const [left, top] = [Math.round(column * width), Math.round(row * height)];
    const [right, bottom] = [Math.round((column + 1) * width), Math.round((row + 1) * height)];
    context.fillStyle = heat(share / highest);
    context.fillRect(left, top, right - left, bottom - top);
  });
}

// Dark blue to light yellow: lightness alone carries the value, so it reads without colour vision and in grey.
const HEAT = [
  [13, 22, 68, 0.4],
  [38, 70, 140, 0.45],
  [94, 110, 130, 0.5],
  [200, 160, 60, 0.62],
  [255, 226, 80, 0.78],
];

function heat(value) {
  const place = Math.min(Math.max(value, 0), 1) * (HEAT.length - 1);
  const i = Math.min(Math.floor(place), HEAT.length - 2);
  const mixed = HEAT[i].map((from, k) => from + (HEAT[i + 1][k] - from) * (place - i));
  return `rgba(${mixed.slice(0, 3).map(Math.round).join(", ")}, ${mixed[3].toFixed(3)})`;
}
