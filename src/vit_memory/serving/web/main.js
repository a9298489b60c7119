// The page: what it knows, and what happens when the visitor or the server changes something.

import { AttentionView } from "./attention.js";
import { hasClassToken, originalCard, taskCard } from "./answers.js";
import { preprocessingOf } from "./crop.js";
import { byId, setText, styled } from "./elements.js";
import { Explanations } from "./explanations.js";
import { watchImageInput } from "./image_input.js";
import { LiveStatus } from "./live.js";
import { TaskManager } from "./manage.js";
import { announce, hideProblem, showLost, showProblem } from "./messages.js";
import { SAMPLES, sampleFile } from "./samples.js";
import { Server, inWords } from "./server.js";
import { drawGraph } from "./task_graph.js";
import { count, milliseconds, rough, shortAnswer, times } from "./text.js";
import { askForToken, useKeptTokens } from "./tokens.js";

const FRESH_MS = 12_000; // how long a task that appeared is marked as new
const MANY = 13; // tasks from which cards are shorter, and can be filtered by name
const wide = matchMedia("(min-width: 60rem)");
const calm = matchMedia("(prefers-reduced-motion: reduce)");

const state = {
  catalogue: null, // what GET /v1/tasks said
  image: null, // {file, number}
  answer: null, // the whole answer of POST /v1/predict for the image
  chosen: null, // name of the task that is explained
  fresh: new Map(), // tasks that appeared a moment ago, and when
  filter: "",
  predicting: null, // AbortController of the running request
};

const server = new Server(askForToken);
const explanations = new Explanations(server);
const attention = new AttentionView({ onClose: () => choose(null) });
const manager = new TaskManager(server, { changed: loadTasks });
const live = new LiveStatus(server, { onVersion: statusSeen, onLost: showLost });

// -------------------------------------------------------------------------------------------------------------- tasks

let loading = null;

/** Ask for the tasks; requests while one is under way share its answer, and ask once more after it. */
function loadTasks() {
  loading = (loading ?? Promise.resolve())
    .catch(() => {})
    .then(async () => {
      const catalogue = await server.tasks();
      const before = state.catalogue;
      if (before?.version === catalogue.version) return;
      state.catalogue = catalogue;
      if (before) markChanges(before, catalogue);
      if (state.chosen && !taskNamed(state.chosen)) choose(null);
      renderCatalogue();
      if (state.image && state.answer?.version !== catalogue.version) await predict();
    });
  return loading;
}

function statusSeen(version) {
  renderSummary(); // the cost of the pass is measured when the server is idle
  byId("metrics-link").hidden = Boolean(server.token); // a link cannot carry the token, and would show a bare 401
  versionSeen(version);
}

function versionSeen(version) {
  if (version && state.catalogue && version !== state.catalogue.version)
    loadTasks().catch((problem) => showProblem(problem, true));
}

function markChanges(before, after) {
  const digest = new Map(before.tasks.map((task) => [task.name, task.digest]));
  const fresh = after.tasks.filter((task) => digest.get(task.name) !== task.digest).map((task) => task.name);
  const gone = before.tasks.filter((task) => !after.tasks.some((other) => other.name === task.name));
  for (const name of fresh) state.fresh.set(name, performance.now());
  if (fresh.length) setTimeout(() => (fresh.forEach((name) => state.fresh.delete(name)), renderAnswers()), FRESH_MS);
  const words = [
    ...fresh.map((name) => `Task ${name} was added.`),
    ...gone.map((task) => `Task ${task.name} was removed.`),
  ];
  if (words.length) announce(words.join(" "));
}

function taskNamed(name) {
  return state.catalogue?.tasks.find((task) => task.name === name) ?? null;
}

/** One pass, unless tasks were trained on images of different sizes: then one for each. */
function passes() {
  const { backbone, tasks } = state.catalogue;
  const sizes = new Set(tasks.map((task) => JSON.stringify(preprocessingOf(task, backbone))));
  return sizes.size > 1 ? `${sizes.size} passes, one for each image size` : "one pass";
}

function renderCatalogue() {
  const { backbone, tasks, branches, version } = state.catalogue;
  setText(byId("heading-tasks"), tasks.length ? count(tasks.length, "task") : "any number of tasks");
  setText(byId("heading-passes"), passes());
  setText(
    byId("backbone-facts"),
    `${backbone.name}: ${rough(backbone.parameters)} frozen parameters, ${count(backbone.depth, "block")}`,
  );
  setText(
    byId("version"),
    `${count(tasks.length, "task")}, ${count(branches.length, "branch", "branches")}, version ${version}`,
  );
  byId("filter-field").hidden = tasks.length < MANY;
  byId("cards").classList.toggle("many", tasks.length >= MANY);
  byId("legend-branch").hidden = !branches.length;
  byId("legend-parent").hidden = !tasks.some((task) => task.parents.length);
  manager.render(state.catalogue);
  live.renderCost({ tasks: tasks.length, branches: branches.length });
  renderAnswers();
  renderGraph();
}

// ------------------------------------------------------------------------------------------------------------ answers

let images = 0;

async function takeImage(file, note) {
  state.image = { file, number: ++images };
  state.answer = null;
  setText(byId("image-note"), note);
  const picture = byId("picture");
  URL.revokeObjectURL(picture.src);
  picture.alt = `The image that was given: ${file.name}`;
  picture.src = URL.createObjectURL(file);
  byId("stage").classList.remove("undisplayable");
  attention.wait(taskNamed(state.chosen));
  await predict();
}

async function predict() {
  state.predicting?.abort();
  const controller = (state.predicting = new AbortController());
  const { image } = state;
  byId("answers").setAttribute("aria-busy", "true");
  byId("graph").classList.add("running");
  try {
    const answer = await server.predict(image.file, { signal: controller.signal });
    if (state.image !== image) return;
    state.answer = answer;
    hideProblem();
    live.renderAnswer(answer.images[0], answer.seconds);
    sayAnswers(answer);
    renderAnswers();
    renderGraph();
    live.ask();
    versionSeen(answer.version);
    await Promise.all([checkOriginal(image, answer, controller.signal), state.chosen ? explain() : null]);
  } catch (error) {
    if (error.name !== "AbortError") {
      state.answer = null;
      attention.show(null, null);
      renderSummary();
      renderAnswers();
      const refused = error.status >= 400 && error.status < 500 && error.status !== 429; // it would be refused again
      showProblem(error, !refused);
    }
  } finally {
    if (state.predicting === controller) {
      byId("answers").removeAttribute("aria-busy");
      setTimeout(() => byId("graph").classList.remove("running"), 900); // the pulse runs to its end
    }
  }
}

/** Compare the original output with the backbone alone; apart, so that the time shown is that of the pass. */
async function checkOriginal(image, answer, signal) {
  try {
    const checked = await server.predict(image.file, { checkOriginal: true, signal });
    if (state.answer !== answer) return;
    answer.images[0].original = checked.images[0].original;
  } catch {
    answer.images[0].original.unchecked = true;
  }
  renderAnswers();
}

function sayAnswers(answer) {
  const { tasks } = answer.images[0];
  const number = Object.keys(tasks).length;
  renderSummary();
  const words = Object.entries(tasks)
    .slice(0, 8)
    .map(([name, task]) => `${name}: ${shortAnswer(task)}`);
  announce(`${words.join(". ")}${number > 8 ? `, and ${number - 8} more` : ""}.`);
}

function renderSummary() {
  const image = state.answer?.images[0];
  const cost = live.cost ? `, ${times(live.cost)} the backbone alone` : "";
  const time = image ? milliseconds(image.stages_ms.compute) : "";
  setText(
    byId("summary"),
    image ? `${count(Object.keys(image.tasks).length, "task")} answered in ${passes()}: ${time}${cost}.` : "",
  );
}

function renderAnswers() {
  if (!state.catalogue) return;
  const focused = document.activeElement?.closest("#answers [data-task]")?.dataset.task; // kept over the new cards
  const { backbone, tasks } = state.catalogue;
  const image = state.answer?.images[0];
  const shown = tasks.filter((task) => task.name.toLowerCase().includes(state.filter));
  byId("cards").replaceChildren(
    originalCard(image?.original ?? null, backbone),
    ...shown.map((task) =>
      taskCard(task, image?.tasks[task.name] ?? null, {
        chosen: task.name === state.chosen,
        freshSince: state.fresh.get(task.name),
        choose: toggle,
      }),
    ),
  );
  if (focused)
    byId("cards")
      .querySelector(`[data-task="${CSS.escape(focused)}"] button`)
      ?.focus({ preventScroll: true });
}

function renderGraph() {
  if (!state.catalogue) return;
  const answers = state.answer?.images[0].tasks ?? {};
  drawGraph(byId("graph"), state.catalogue, {
    answers,
    chosen: state.chosen,
    explanation: explanations.get(state.image, taskNamed(state.chosen)),
    choose: toggle,
  });
}

// ------------------------------------------------------------------------------------------------------- explanations

function toggle(name) {
  choose(name === state.chosen ? null : name);
}

function choose(name) {
  state.chosen = name;
  renderAnswers();
  renderGraph();
  if (name === null) {
    attention.show(null, null);
    return;
  }
  explain().then(() => {
    if (!wide.matches) byId("stage").scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "start" });
  });
}

async function explain() {
  const { image } = state;
  const task = taskNamed(state.chosen);
  if (!task || !image) return;
  const current = () => state.image === image && state.chosen === task.name;
  if (!explanations.get(image, task)) attention.wait(task);
  try {
    const explanation = await explanations.ask(image, task);
    if (!current()) return; // another image or task was chosen in the meantime
    attention.show(task, explanation, { backbone: state.catalogue.backbone });
    renderGraph();
  } catch (problem) {
    if (current()) attention.show(task, null, { message: inWords(problem) });
  }
}

// -------------------------------------------------------------------------------------------------------------- start

function start() {
  useKeptTokens(server);
  byId("retry").addEventListener("click", () => (state.image ? predict() : begin()));
  byId("filter").addEventListener("input", (event) => {
    state.filter = event.target.value.trim().toLowerCase();
    renderAnswers();
  });
  byId("picture").addEventListener("error", () => byId("stage").classList.add("undisplayable"));
  const column = document.querySelector(".give");
  new ResizeObserver(() => styled(column, { "--own-height": `${column.offsetHeight}px` })).observe(column);
  new ResizeObserver(renderGraph).observe(byId("graph").parentElement);
  watchImageInput({
    onImage: takeImage,
    onTaskFiles: (files) => manager.takeFiles(files),
    onProblem: (title, detail) => showProblem({ title, detail }, false),
  });
  begin();
}

async function begin() {
  try {
    await loadTasks();
  } catch (problem) {
    showProblem(problem, true);
    return;
  }
  hideProblem();
  live.start();
  server.watchWhileVisible(versionSeen);
  const first =
    state.catalogue.tasks.find((task) => hasClassToken(task) && task.cells) ??
    state.catalogue.tasks.find(hasClassToken);
  if (wide.matches && first) state.chosen = first.name;
  await takeImage(await sampleFile(SAMPLES[0]), "");
}

start();
