// Nodes are made by name and filled with text: nothing that a model or a user wrote is ever read as HTML.
export const $ = (id) => document.getElementById(id);
export const number = (n) => n.toLocaleString("en");

export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  for (const child of children.flat()) made.append(child); // one by one: there may be more than a call takes
  return made;
}

export function button(label, act, properties = {}) {
  const made = make("button", { type: "button", textContent: label, ...properties });
  made.addEventListener("click", act);
  return made;
}

// The clipboard's interface is there on localhost and over TLS alone; elsewhere what is selected is copied.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

export function copyButton(textOf, label = "Copy") {
  const made = button(label, async () => {
    const done = await copy(textOf()).then(() => "Copied", () => "Not allowed");
    made.textContent = done;
    setTimeout(() => { made.textContent = label; }, 1500);
  });
  return made;
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
