// Nodes are made by name and filled with text: nothing that a model or a user wrote is ever read as HTML.
export const $ = (id) => document.getElementById(id);
export const number = (n) => n.toLocaleString("en", { maximumFractionDigits: 0 });
export const megabytes = (count) => `${(count / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} MB`;
export const percent = (part, whole) => `${(100 * part / Math.max(1, whole)).toFixed(1)} %`;

export function span(seconds) {
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  for (const child of children.flat()) made.append(child); // one by one: there may be more than a call takes
  return made;
}

// Rows of a table, each a list of texts or nodes.
export function rowsOf(rows) {
  return rows.map((cells) => make("tr", {}, cells.map((cell) => make("td", {}, cell))));
}

// A bar of parts [[name, count], ...], each in the colour of its name. Words beside it say the same.
export function bar(parts, total) {
  return make("div", { className: "bar", ariaHidden: "true" }, parts.map(([tier, count]) => {
    const part = make("i", { className: tier });
    part.style.width = `${100 * count / total}%`;
    return part;
  }));
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
