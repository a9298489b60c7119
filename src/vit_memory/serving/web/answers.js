// The answers side by side: one card for the original output, one for every task.

import { h, styled } from "./elements.js";
import { count, describeTask, grouped, measured, percent } from "./text.js";

/** The card of the original output; `original` is null before the first answer. */
export function originalCard(original, backbone) {
  const seal = sealOf(original);
  const body = original?.top?.length
    ? bars(original.top.map((item, i) => ({ ...item, label: `class ${item.label}`, winner: i === 0 })))
    : h(
        "p",
        { class: "quiet" },
        original
          ? `A feature of ${grouped(original.feature_size)} values: this backbone has no head of its own.`
          : "What the backbone answers without any task.",
      );
  return h(
    "li",
    { class: "card original" },
    h("h3", {}, "Original output"),
    h("p", { class: "about" }, backbone ? `${backbone.name}, ${backbone.depth} frozen blocks` : "the frozen backbone"),
    body,
    seal,
  );
}

function sealOf(original) {
  if (original?.identical === true) {
    return h(
      "p",
      { class: "seal yes" },
      h("b", {}, "✓ Untouched."),
      " Compared just now with the backbone alone: identical to the bit.",
    );
  }
  if (original?.identical === false) {
    return h(
      "p",
      { class: "seal no", role: "alert" },
      h("b", {}, "✗ Changed."),
      " It differs from the backbone alone. That must not happen: please report it.",
    );
  }
  if (original && !original.unchecked) return h("p", { class: "seal" }, "Comparing it with the backbone alone…");
  return h(
    "p",
    { class: "seal" },
    h("b", {}, "Untouched."),
    " No task can change it: none of its tokens reads a task.",
  );
}

/** The card of one task. `answer` is null before the first answer; `choose` shows where the task looked. */
export function taskCard(task, answer, { chosen, freshSince, choose }) {
  const fresh = freshSince !== undefined;
  const explainable = hasClassToken(task);
  const name = explainable
    ? h(
        "button",
        {
          type: "button",
          class: "name",
          "aria-pressed": String(chosen),
          click: () => choose(task.name),
          "aria-describedby": "choose-hint",
          title: `See where ${task.name} looked`,
        },
        task.name,
      )
    : h("span", { class: "name" }, task.name);
  const card = h(
    "li",
    { class: `card task${chosen ? " chosen" : ""}${fresh ? " fresh" : ""}`, "data-task": task.name },
    h("h3", {}, name, fresh ? h("span", { class: "new" }, "new") : null),
    h("p", { class: "about" }, describeTask(task)),
    answer ? answerBody(answer) : placeholder(),
    explainable && answer
      ? h("p", { class: "look", "aria-hidden": "true" }, chosen ? "shown over the image" : "where did it look?")
      : null,
  );
  // Cards are made anew with every answer: an animation under way goes on where it was.
  return fresh ? styled(card, { "animation-delay": `${freshSince - performance.now()}ms` }) : card;
}

export function hasClassToken(task) {
  return task.regime !== "head" && task.regime !== "full";
}

function answerBody(answer) {
  if (answer.error) return h("p", { class: "quiet" }, answer.error.detail ?? answer.error.title);
  if (answer.not_a_number && answer.kind !== "regression") {
    return h("p", { class: "quiet" }, "Its output is not a number: this task is broken. The others are not affected.");
  }
  if (answer.kind === "regression") {
    return h(
      "dl",
      { class: "values" },
      Object.entries(answer.values).map(([name, value]) =>
        h("div", {}, h("dt", {}, name), h("dd", {}, value === null ? "not a number" : measured(value))),
      ),
    );
  }
  if (answer.kind === "multi-label") {
    const present = new Set(answer.labels.map((item) => item.label));
    const list = bars(
      answer.top.map((item) => ({ ...item, winner: present.has(item.label), present: present.has(item.label) })),
    );
    const missing = present.size - answer.top.filter((item) => present.has(item.label)).length;
    if (missing > 0) list.append(h("li", { class: "rest" }, `and ${count(missing, "more label")} above its threshold`));
    return list;
  }
  return bars(answer.top.map((item, i) => ({ ...item, winner: i === 0 })));
}

/** Labels with bars; a mark on the bar is the threshold from which a label counts as present. */
function bars(items) {
  return h(
    "ul",
    { class: "bars" },
    items.map((item) => {
      const state = item.present === undefined ? "" : item.present ? "present: " : "absent: ";
      const bar = styled(h("span", { class: "bar", "aria-hidden": "true" }), { "--share": item.probability });
      if (item.threshold !== undefined && item.threshold !== null) {
        bar.append(styled(h("i", { title: `present from ${percent(item.threshold)}` }), { "--at": item.threshold }));
      }
      return h(
        "li",
        { class: item.winner ? "winner" : "" },
        h(
          "span",
          { class: "label" },
          state ? h("span", { class: "said" }, state) : null,
          item.present ? h("span", { class: "tick", "aria-hidden": "true" }, "✓ ") : null,
          item.label,
        ),
        h("span", { class: "share" }, percent(item.probability)),
        bar,
      );
    }),
  );
}

function placeholder() {
  return h("p", { class: "quiet" }, "No answer yet.");
}
