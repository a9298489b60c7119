// Tokens that the visitor types: for this page alone, or kept in this tab until it is closed.

import { byId, setText } from "./elements.js";

const KEYS = { token: "vit-memory token", admin: "vit-memory admin token" };

function keptToken(which) {
  try {
    return sessionStorage.getItem(KEYS[which]);
  } catch {
    return null; // storage is switched off
  }
}

function keepToken(which, token) {
  try {
    if (token) sessionStorage.setItem(KEYS[which], token);
    else sessionStorage.removeItem(KEYS[which]);
  } catch {
    // it is then asked for again
  }
}

/** Give the server the tokens that this tab keeps, and keep the admin token if the visitor asks for it. */
export function useKeptTokens(server) {
  server.token = keptToken("token");
  const [admin, keep] = [byId("admin-token"), byId("keep-admin")];
  admin.value = keptToken("admin") ?? "";
  server.adminToken = admin.value || null;
  keep.checked = Boolean(admin.value);
  const remember = () => keepToken("admin", keep.checked ? admin.value : null);
  keep.addEventListener("change", remember);
  admin.addEventListener("change", remember);
}

/** Ask for the token in a dialog: resolves to it, or to null if the visitor closed the dialog. */
export function askForToken(problem) {
  const dialog = byId("token-dialog");
  const input = byId("token");
  setText(byId("token-problem"), keptToken("token") || input.value ? problem.detail : "");
  keepToken("token", null); // it was refused
  input.value = "";
  dialog.returnValue = "";
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const token = dialog.returnValue === "use" ? input.value.trim() : "";
        if (token && byId("keep-token").checked) keepToken("token", token);
        resolve(token || null);
      },
      { once: true },
    );
    dialog.showModal();
  });
}
