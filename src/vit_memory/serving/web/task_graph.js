// The pass, drawn: one lane for the original tokens, one for every branch, one for every task, block by block.

import { svg } from "./elements.js";
import { hasClassToken } from "./answers.js";
import { attentionParts } from "./attention.js";
import { count, listed, shortAnswer } from "./text.js";

const NARROW = 640; // below this width names stand above their lanes
const MOST_DOTS = 5; // memory cells drawn one by one

/** Draw the graph into `drawing`. `answers` are by task; `explanation` is of the chosen task, or null. */
export function drawGraph(drawing, { backbone, tasks, branches }, { answers, chosen, explanation, choose }) {
  const width = Math.max(280, drawing.parentElement.clientWidth);
  const plan = place(width, backbone.depth, branches, orderTasks(tasks, branches));
  const lit = chosen ? new Set([chosen, ...ancestors(tasks, chosen)]) : null;
  const parts = [
    ...branches.map((branch) => branchWire(plan, branch)),
    ...(chosen ? connectors(plan, chosen, explanation) : []),
    ...trunkLane(plan, backbone),
    ...branches.flatMap((branch) => branchLane(plan, branch)),
    ...tasks.flatMap((task) => parentArcs(plan, task, lit)),
    ...tasks.map((task) => taskLane(plan, task, { answer: answers[task.name], chosen, lit, choose })),
  ];
  drawing.setAttribute("viewBox", `0 0 ${width} ${plan.height}`);
  drawing.setAttribute("width", width);
  drawing.setAttribute("height", plan.height);
  drawing.setAttribute("aria-label", describe(backbone, tasks, branches));
  drawing.replaceChildren(...parts);
}

/** Tasks of the original trunk first, then those of each branch; within, children below their parents. */
function orderTasks(tasks, branches) {
  const place = new Map([[null, 0], ...branches.map((branch, i) => [branch.name, i + 1])]);
  const left = [...tasks].sort((a, b) => (place.get(a.branch) ?? 0) - (place.get(b.branch) ?? 0));
  const ordered = [];
  const visit = (task) => {
    if (ordered.includes(task)) return;
    ordered.push(task);
    for (const child of left.filter((other) => other.parents.includes(task.name) && other.branch === task.branch)) {
      if (child.parents.every((name) => ordered.some((other) => other.name === name))) visit(child);
    }
  };
  for (const task of left) {
    const parentsHere = left.some((other) => task.parents.includes(other.name) && other.branch === task.branch);
    if (!parentsHere) visit(task);
  }
  for (const task of left) visit(task);
  return ordered;
}

function ancestors(tasks, name) {
  const parents = tasks.find((task) => task.name === name)?.parents ?? [];
  return parents.flatMap((parent) => [parent, ...ancestors(tasks, parent)]);
}

/** Where everything stands: lanes by name, blocks by number. */
function place(width, depth, branches, ordered) {
  const narrow = width < NARROW;
  const arcs = Math.max(
    0,
    ...ordered.map((task) => Math.max(0, ...task.parents.map((parent) => arcDepth(ordered, task.name, parent)))),
  );
  const gutter = arcs ? arcs + 6 : 0;
  const [names, answers] = narrow ? [0, 0] : [Math.min(190, width * 0.19), Math.min(210, width * 0.2)];
  const [laneHeight, trunkHeight] = narrow ? [50, 56] : [36, 46];
  const left = gutter + (narrow ? 6 : 8) + names;
  const right = width - answers - 6;
  let top = 4;
  const lane = new Map();
  for (const branch of [null, ...branches]) {
    // a trunk, then the tasks that stand on it
    lane.set(branch ? `branch ${branch.name}` : "", top + (narrow ? 38 : trunkHeight / 2));
    top += trunkHeight + 4;
    for (const task of ordered.filter((candidate) => candidate.branch === (branch?.name ?? null))) {
      lane.set(`task ${task.name}`, top + (narrow ? 32 : laneHeight / 2 - 3));
      top += laneHeight;
    }
    top += branches.length ? 10 : 0;
  }
  const pitch = (right - left) / depth;
  return {
    width,
    narrow,
    gutter,
    left,
    right,
    pitch,
    depth,
    ordered,
    answers,
    branches,
    height: top + 4,
    text: gutter + (gutter ? 8 : 0),
    square: Math.min(narrow ? 18 : 24, pitch - 3),
    x: (block) => left + (block + 0.5) * pitch,
    y: (name) => lane.get(name),
    nameWidth: narrow ? width * 0.55 : names - 10,
    answerWidth: answers - 12,
  };
}

function arcDepth(ordered, child, parent) {
  const row = (name) => ordered.findIndex((task) => task.name === name);
  return 8 + Math.min(22, 4 * Math.abs(row(child) - row(parent)));
}

// ------------------------------------------------------------------------------------------------------------- lanes

function trunkLane(plan, backbone) {
  const y = plan.y("");
  const { first, last } = texts(plan, y, {
    title: "original tokens",
    note: `${backbone.name}, frozen`,
    answer: plan.narrow ? "original output" : "original output, untouched",
  });
  return [
    line(plan.left - 4, y, plan.right + 2, y, "wire original"),
    arrow(plan.right + 2, y, "original"),
    ...range(0, plan.depth).map((block) => square(plan, block, y, "block original")),
    first,
    last,
  ];
}

function branchWire(plan, branch) {
  const [from, y] = [plan.y(""), plan.y(`branch ${branch.name}`)];
  const x = plan.left + branch.start * plan.pitch;
  const bend = Math.min(10, plan.pitch / 2);
  return svg("path", {
    d: `M${x},${from} V${y - bend} Q${x},${y} ${x + bend},${y} H${plan.right + 2}`,
    class: "wire branch",
  });
}

function branchLane(plan, branch) {
  const y = plan.y(`branch ${branch.name}`);
  const note = branch.start ? `leaves after block ${branch.start}` : "all blocks, from the first";
  const { first, last } = texts(plan, y, { title: `branch ${branch.name}`, note, answer: "" });
  return [...range(branch.start, plan.depth).map((block) => square(plan, block, y, "block branch")), first, last];
}

function taskLane(plan, task, { answer, chosen, lit, choose }) {
  const y = plan.y(`task ${task.name}`);
  const branch = plan.branches.find((candidate) => candidate.name === task.branch);
  const { first, last } = texts(plan, y, { title: task.name, note: "", answer: shortAnswer(answer) });
  const explainable = hasClassToken(task);
  const marks = explainable
    ? [
        line(plan.left, y, plan.right, y, "wire task"),
        ...range(0, plan.depth).flatMap((block) => token(plan, task, block, y, branch && block >= branch.start)),
      ]
    : [
        svg(
          "text",
          { x: plan.right - 12, y: y + 4, "text-anchor": "end", class: "note" },
          `a head on the ${branch ? "branch’s" : "original"} output`,
        ),
        svg("circle", { cx: plan.right - 3, cy: y, r: 4.5, class: "token hollow" }),
      ];
  const state = chosen === task.name ? "chosen" : lit && !lit.has(task.name) ? "dim" : "";
  const row = plan.narrow ? [y - 30, 48] : [y - 15, 36];
  const target = svg("rect", { x: 0, y: row[0], width: plan.width, height: row[1], rx: 6, class: "row" });
  return svg(
    "g",
    {
      class: `lane ${state} ${explainable ? "choosable" : ""}`,
      "data-task": task.name,
      click: explainable ? () => choose(task.name) : null,
    },
    target,
    marks,
    first,
    last,
  );
}

/** The class token in one block, and the memory cells it reads there. */
function token(plan, task, block, y, onBranch) {
  const x = plan.x(block);
  const circle = svg("circle", {
    cx: x,
    cy: y,
    r: Math.min(4.5, plan.pitch / 3),
    class: `token${onBranch ? " branch" : ""}`,
  });
  circle.style.setProperty("--block", block);
  if (!task.cells) return [circle];
  const dots = Math.min(task.cells, MOST_DOTS);
  const spread = (dots - 1) * 4;
  if (spread + 4 > plan.pitch) {
    const length = Math.max(3, plan.pitch - 4);
    return [circle, svg("rect", { x: x - length / 2, y: y + 8, width: length, height: 3, rx: 1.5, class: "cell" })];
  }
  return [
    circle,
    ...range(0, dots).map((i) => svg("circle", { cx: x - spread / 2 + 4 * i, cy: y + 10, r: 1.7, class: "cell" })),
  ];
}

/** From the tokens that the chosen task reads to its class token, as wide as its attention to them. */
function connectors(plan, name, explanation) {
  const task = plan.ordered.find((candidate) => candidate.name === name);
  if (!task || !hasClassToken(task)) return [];
  const branch = plan.branches.find((candidate) => candidate.name === task.branch);
  return range(0, plan.depth).map((block) => {
    const parts = explanation ? attentionParts(explanation.blocks[block]) : [];
    const share = parts.slice(0, 2).reduce((sum, part) => sum + part.share, 0);
    const from = plan.y(branch && block >= branch.start ? `branch ${branch.name}` : "");
    const [x, y] = [plan.x(block) - Math.min(11, 0.42 * plan.pitch), plan.y(`task ${name}`)]; // beside other tokens
    const bend = plan.x(block) - x;
    const wire = svg("path", { d: `M${x},${from} V${y - bend} Q${x},${y} ${plan.x(block)},${y}`, class: "wire reads" });
    wire.style.setProperty("stroke-width", `${(1 + 5 * share).toFixed(1)}px`);
    return wire;
  });
}

function parentArcs(plan, task, lit) {
  return task.parents
    .filter((parent) => plan.y(`task ${parent}`) !== undefined)
    .flatMap((parent) => {
      const [from, to] = [plan.y(`task ${parent}`), plan.y(`task ${task.name}`)].map((y) => y - (plan.narrow ? 16 : 0));
      const depth = arcDepth(plan.ordered, task.name, parent);
      const x = plan.gutter - 2;
      const dim = lit && !(lit.has(task.name) && lit.has(parent)) ? " dim" : "";
      return [
        svg("path", {
          d: `M${x},${from} C${x - depth},${from} ${x - depth},${to} ${x - 5},${to}`,
          class: `wire parent${dim}`,
        }),
        arrow(x - 1, to, `parent${dim}`),
      ];
    });
}

// ------------------------------------------------------------------------------------------------------------ pieces

function texts(plan, y, { title, note, answer }) {
  const baseline = plan.narrow ? y - 13 : y + 4;
  const name = fit(title, plan.nameWidth, 7.6);
  const first = svg("text", { x: plan.text, y: !plan.narrow && note ? y - 2 : baseline, class: "title" }, name);
  if (note && !plan.narrow)
    first.append(svg("tspan", { x: plan.text, dy: 14, class: "note" }, fit(note, plan.nameWidth, 6.4)));
  const end = plan.narrow ? { x: plan.width - 2, "text-anchor": "end" } : { x: plan.right + 14 };
  const space = plan.narrow ? plan.width - plan.text - 8 * name.length - 12 : plan.answerWidth; // beside the name
  const last = svg("text", { ...end, y: baseline, class: "answer" }, fit(answer, space, 7.2));
  return { first, last };
}

function square(plan, block, y, style) {
  const side = plan.square;
  const piece = svg("rect", {
    x: plan.x(block) - side / 2,
    y: y - side / 2,
    width: side,
    height: side,
    rx: side / 5,
    class: style,
  });
  piece.style.setProperty("--block", block);
  return piece;
}

function line(x1, y1, x2, y2, style) {
  return svg("line", { x1, y1, x2, y2, class: style });
}

function arrow(x, y, style) {
  return svg("path", { d: `M${x},${y - 4} L${x + 6},${y} L${x},${y + 4} Z`, class: `head ${style}` });
}

function fit(text, width, perLetter) {
  const most = Math.max(4, Math.floor(width / perLetter));
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

function range(from, to) {
  return Array.from({ length: to - from }, (_, i) => from + i);
}

function describe(backbone, tasks, branches) {
  const lines = [`The original tokens pass ${count(backbone.depth, "frozen block")} once.`];
  for (const branch of branches) lines.push(`Branch ${branch.name} leaves them after block ${branch.start}.`);
  for (const task of tasks) {
    const reads = hasClassToken(task)
      ? `reads ${task.branch ? `branch ${task.branch}` : "the original tokens"}`
      : "reads the final output";
    const cells = task.cells ? `, ${count(task.cells, "memory cell")} per block` : "";
    lines.push(`${task.name} ${reads}${cells}${task.parents.length ? `, and extends ${listed(task.parents)}` : ""}.`);
  }
  return lines.join(" ");
}
