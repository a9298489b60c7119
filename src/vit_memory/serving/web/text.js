// Numbers and names as people read them, the same way everywhere on the page.

const THIN = "\u202f"; // a narrow space that does not break: between a number and its unit

export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.1) return `<${THIN}0.1${THIN}%`;
  if (value === 0) return `0${THIN}%`;
  const near = value > 99 && value < 100; // a confidence of 99.7 % is not certainty
  return `${value < 1 || near ? Math.min(value, 99.9).toFixed(1) : Math.round(value)}${THIN}%`;
}

export function milliseconds(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(0)}${THIN}s`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)}${THIN}s`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)}${THIN}ms`;
}

export function bytes(value) {
  if (value < 1000) return `${value}${THIN}B`;
  const [unit, divisor] = value < 1e6 ? ["kB", 1e3] : value < 1e9 ? ["MB", 1e6] : ["GB", 1e9];
  const amount = value / divisor;
  return `${amount < 10 ? amount.toFixed(1) : Math.round(amount)}${THIN}${unit}`;
}

export function count(number, one, many = `${one}s`) {
  return `${grouped(number)} ${number === 1 ? one : many}`;
}

/** A whole number, thousands apart by a thin space. */
export function grouped(number) {
  return String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, THIN);
}

/** A large count in short: 5.2 million. */
export function rough(number) {
  if (number >= 1e9) return `${(number / 1e9).toFixed(1)} billion`;
  if (number >= 1e6) return `${(number / 1e6).toFixed(number < 1e7 ? 1 : 0)} million`;
  return grouped(number);
}

/** A measured value with four digits, without zeros at its end. */
export function measured(value) {
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

export function times(factor) {
  return `${factor < 10 ? factor.toFixed(2) : factor.toFixed(1)}${THIN}×`;
}

/** a, b and c */
export function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`;
}

/** What a task is, in a few words: `one label of 10 · extends pets · on branch birds`. */
export function describeTask(task) {
  const number = task.labels.length;
  const kinds = {
    "single-label": `one label of ${number}`,
    "multi-label": `several labels of ${number}`,
    regression: count(number, "number"),
  };
  const parts = [kinds[task.kind] ?? task.kind];
  if (task.parents.length) parts.push(`extends ${listed(task.parents)}`);
  if (task.branch) parts.push(`on branch ${task.branch}`);
  return parts.join(" · ");
}

/** What a task answers, in a few words: `cat (98 %)`. */
export function shortAnswer(answer) {
  if (!answer) return "";
  if (answer.error) return "no answer";
  if (answer.kind === "regression") {
    return Object.values(answer.values)
      .map((value) => (value === null ? "not a number" : measured(value)))
      .join(", ");
  }
  if (answer.not_a_number) return "not a number";
  if (answer.kind === "multi-label") return answer.labels.map((item) => item.label).join(", ") || "none";
  return `${answer.label} (${percent(answer.confidence)})`;
}
