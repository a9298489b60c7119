// What a task or branch file says of itself: its header is JSON, so it can be shown before it is sent.

const LARGEST_HEADER = 64 * 2 ** 20;

/** {what: "tasks" | "branches", name, kind, labels, parents, branch, file}; throws an Error that says what is wrong. */
export async function readTaskFile(file) {
  const length = file.size >= 8 ? Number(new DataView(await file.slice(0, 8).arrayBuffer()).getBigUint64(0, true)) : 0;
  if (length < 2 || length > Math.min(file.size - 8, LARGEST_HEADER))
    throw new Error(`${file.name} is not a task file.`);
  let metadata;
  let description;
  try {
    metadata = JSON.parse(await file.slice(8, 8 + length).text()).__metadata__ ?? {};
    description = JSON.parse(metadata.task ?? metadata.branch);
  } catch {
    throw new Error(`${file.name} is not a task file: it has no description of a task or a branch.`);
  }
  const what = metadata.task ? "tasks" : "branches";
  return {
    what,
    file,
    name: String(description.name),
    kind: description.kind ?? null,
    labels: description.labels ?? [],
    parents: (description.parents ?? []).map((parent) => parent.name),
    branch: description.branch?.name ?? null,
  };
}

/** Branches first, then parents before the tasks that extend them: the order in which the server accepts them. */
export function inOrder(files) {
  const ordered = files.filter((item) => item.what === "branches");
  const waiting = files.filter((item) => item.what === "tasks");
  while (waiting.length) {
    const ready = waiting.findIndex((item) => !waiting.some((other) => item.parents.includes(other.name)));
    ordered.push(...waiting.splice(Math.max(ready, 0), 1)); // a circle is refused by the server, with its reason
  }
  return ordered;
}
