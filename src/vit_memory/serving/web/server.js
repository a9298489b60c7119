// The server's HTTP interface: requests with a token, errors as values, and the stream of task changes.

const RETRY_MS = [1000, 2000, 4000, 8000, 15_000];

const IN_PLAIN_WORDS = {
  401: "The server asks for a token",
  403: "This token may not do that",
  404: "Not found",
  409: "This does not fit what the server has now",
  412: "The task has changed in the meantime",
  413: "The file is too large",
  415: "The server does not read this type of file",
  422: "The image could not be read",
  429: "The server is busy",
  503: "The server is busy",
  504: "The answer took too long",
};

/** What went wrong, in words for the page: a title and a detail. */
export class Problem extends Error {
  constructor({ status = 0, title = "", detail = "", retryAfter = null, requestId = null }) {
    super(detail || title);
    Object.assign(this, { status, title: IN_PLAIN_WORDS[status] ?? title, detail, retryAfter, requestId });
  }
}

/** A problem as one sentence or two. */
export function inWords(problem) {
  return [problem.title, problem.detail || problem.message].filter(Boolean).join(": ");
}

export class Server {
  /** `askToken(problem)` resolves to a token that the visitor typed, or null if they gave up. */
  constructor(askToken) {
    this.askToken = askToken;
    this.token = null;
    this.adminToken = null;
    this.asking = null; // the one open question for a token, shared by all requests that wait for it
    this.declined = false; // the visitor closed that question: only what they do themselves opens it again
  }

  async tasks() {
    return (await this.request("v1/tasks")).json();
  }

  async status() {
    return (await this.request("v1/status", {}, { background: true })).json();
  }

  /** One image's answers. `blob` is sent as it is: the server decodes what the visitor gave, not a copy. */
  async predict(blob, { tasks = [], explain = [], checkOriginal = false, signal } = {}) {
    const query = new URLSearchParams({ top_k: 5 });
    for (const name of tasks) query.append("tasks", name);
    for (const name of explain) query.append("explain", name);
    if (checkOriginal) query.set("check_original", "true");
    const type = blob.type.startsWith("image/") ? blob.type : "application/octet-stream";
    const options = { method: "POST", body: blob, headers: { "Content-Type": type }, signal };
    const answer = await (await this.request(`v1/predict?${query}`, options)).json();
    if (answer.images[0].error) throw new Problem(answer.images[0].error);
    return answer;
  }

  /** Add a file; `what` is `tasks` or `branches`. With a digest it replaces that version, else it must be new. */
  async put(what, name, file, digest = null) {
    const condition = digest === null ? { "If-None-Match": "*" } : { "If-Match": `"${digest}"` };
    const headers = { "Content-Type": "application/octet-stream", ...condition };
    const options = { method: "PUT", body: file, headers };
    await this.request(`v1/${what}/${encodeURIComponent(name)}`, options, { admin: true });
  }

  async remove(what, name, digest) {
    const options = { method: "DELETE", headers: { "If-Match": `"${digest}"` } };
    await this.request(`v1/${what}/${encodeURIComponent(name)}`, options, { admin: true });
  }

  async file(what, name) {
    return (await this.request(`v1/${what}/${encodeURIComponent(name)}/file`)).blob();
  }

  /** `admin`: with the admin token. `background`: sent by the page again and again, without the visitor. */
  async request(path, options = {}, { admin = false, background = false } = {}) {
    for (;;) {
      const token = admin ? (this.adminToken ?? this.token) : this.token;
      const headers = { Accept: "application/json", ...options.headers };
      if (token) headers.Authorization = `Bearer ${token}`;
      let response;
      try {
        response = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Problem({
          title: "The server does not answer",
          detail: "It may have stopped, or the network is down.",
        });
      }
      if (response.ok) return response;
      const problem = await readProblem(response);
      if (response.status !== 401 || admin || (background && this.declined)) throw problem;
      if (this.token === token && !(await this.newToken(problem))) throw problem;
    }
  }

  /** Ask the visitor once, however many requests were refused. */
  async newToken(problem) {
    this.asking ??= this.askToken(problem).finally(() => (this.asking = null));
    const token = await this.asking;
    if (token) this.token = token;
    this.declined = !token;
    return Boolean(token);
  }

  /** `watch` while the page is visible: browsers allow few connections to one server. */
  watchWhileVisible(changed) {
    let controller = null;
    const follow = () => {
      controller?.abort();
      controller = document.hidden ? null : new AbortController();
      if (controller) this.watch(changed, controller.signal);
    };
    document.addEventListener("visibilitychange", follow);
    follow();
  }

  /**
   * Call `changed(version)` when the task set changes, until `signal` aborts. The stream is read with fetch and not
   * with EventSource, which cannot send a token.
   */
  async watch(changed, signal) {
    for (let failures = 0; !signal.aborted; failures++) {
      try {
        const options = { headers: { Accept: "text/event-stream" }, signal };
        const response = await this.request("v1/events", options, { background: true });
        for await (const event of serverSentEvents(response.body)) {
          failures = 0;
          if (event.type === "tasks") changed(JSON.parse(event.data).version);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 404) return; // an older server: the status, asked for every few seconds, has the version
      }
      await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)], signal);
    }
  }
}

async function readProblem(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // a proxy's own page: the status has to do
  }
  const detail = typeof body.detail === "string" ? body.detail : "";
  return new Problem({
    status: response.status,
    title: body.title ?? `The server answered with status ${response.status}`,
    detail,
    retryAfter: Number(response.headers.get("Retry-After")) || null,
    requestId: response.headers.get("X-Request-Id"),
  });
}

async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer = (buffer + value).replace(/\r\n?/g, "\n");
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const event = { type: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event:")) event.type = line.slice(6).trim();
          if (line.startsWith("data:")) event.data += line.slice(5).trim();
        }
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
