// The panel of settings. An empty field is not sent: the server's and the model's own default holds.
import { $ } from "/chat/elements.js";
import { recall, remember } from "/chat/store.js";

const fields = () => [...$("settings").querySelectorAll("[data-field]")];

export function beginSettings() {
  const kept = recall("settings", {});
  for (const field of fields()) {
    field.value = kept[field.id] ?? field.value;
    field.addEventListener("input", keep);
  }
  $("defaults").addEventListener("click", () => {
    for (const field of fields()) field.value = "";
    keep();
  });
}

function keep() {
  remember("settings", Object.fromEntries(fields().map((field) => [field.id, field.value])));
  const wrong = problem();
  $("settings-problem").textContent = wrong ?? "";
}

function problem() {
  for (const field of fields()) if (!field.validity.valid) return `${field.labels[0].textContent}: ${field.validationMessage}`;
  try { extra(); return null; } catch (error) { return error.message; }
}

// Fields of the request for which there is no control, tools among them.
function extra() {
  const text = $("extra").value.trim();
  if (!text) return {};
  let found;
  try { found = JSON.parse(text); } catch (error) { throw new Error(`More fields: ${error.message}`); }
  if (typeof found !== "object" || found === null || Array.isArray(found)) throw new Error("More fields: write a JSON object");
  return found;
}

// The fields of a request, or an Error that names the one that can't be sent.
export function requestFields() {
  const wrong = problem();
  if (wrong) throw new Error(wrong);
  const made = {};
  for (const field of fields()) {
    const value = field.value.trim();
    if (!value || field.id === "extra") continue;
    made[field.dataset.field] = field.type === "number" ? Number(value) : value;
  }
  if (made.stop) made.stop = made.stop.split("\n").filter(Boolean);
  return { ...made, ...extra() };
}
