// What the page tells: announcements for screen readers, problems for everybody.

import { byId, setText } from "./elements.js";
import { count } from "./text.js";

/** Said by screen readers, seen by nobody. */
export function announce(text) {
  setText(byId("announcer"), text);
}

/** Show a problem above the answers; `again` offers another try. */
export function showProblem(problem, again) {
  setText(byId("problem-title"), problem.title || "Something went wrong");
  const wait = problem.retryAfter ? ` Try again in ${count(problem.retryAfter, "second")}.` : "";
  setText(byId("problem-detail"), `${problem.detail ?? problem.message}${wait}`);
  setText(byId("problem-id"), problem.requestId ? `Request ${problem.requestId}` : "");
  byId("retry").hidden = !again;
  byId("problem").hidden = false;
}

export function hideProblem() {
  byId("problem").hidden = true;
}

/** Whether the server answers at all. */
export function showLost(lost) {
  byId("lost").hidden = !lost;
}
