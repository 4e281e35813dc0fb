// Pictures that go with the next question, by paste, drop or file; text files become part of the question.
import { $, button, make } from "/chat/elements.js";

const MAX_IMAGE_BYTES = 20 * 1024 * 1024, MAX_TEXT_BYTES = 1024 * 1024, MAX_IMAGES = 16;
const KINDS = new Set(["image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp"]);
let images = [], takesImages = true, tell = () => {}, changed = () => {};

function read(file, as) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader[as](file);
  });
}

function show() {
  $("attached").replaceChildren(...images.map((url, i) => make("li", {}, make("img", { src: url, alt: `Picture ${i + 1}` }),
    button("Remove", () => { images.splice(i, 1); show(); changed(); }, { ariaLabel: `Remove picture ${i + 1}` }))));
}

async function attachImage(file) {
  if (!takesImages) throw new Error("this model takes no pictures");
  if (!KINDS.has(file.type)) throw new Error(`${file.name}: pictures are PNG, JPEG, GIF, WebP or BMP`);
  if (file.size > MAX_IMAGE_BYTES) throw new Error(`${file.name} is larger than 20 MB`);
  if (images.length >= MAX_IMAGES) throw new Error(`a question takes ${MAX_IMAGES} pictures`);
  images.push(await read(file, "readAsDataURL"));
}

async function attachText(file) {
  if (file.size > MAX_TEXT_BYTES) throw new Error(`${file.name} is larger than 1 MB`);
  const text = await read(file, "readAsText");
  if (text.includes("\0")) throw new Error(`${file.name} is neither a picture nor text`);
  let fence = "```";
  while (text.includes(fence)) fence += "`";
  $("question").value += `${$("question").value ? "\n\n" : ""}${file.name}:\n${fence}\n${text}\n${fence}\n`;
}

async function attach(files) {
  try {
    for (const file of files) await (file.type.startsWith("image/") ? attachImage(file) : attachText(file));
  } catch (error) { tell(error.message, true); }
  show();
  changed();
}

export function beginAttachments(onProblem, onChange) {
  [tell, changed] = [onProblem, onChange];
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => { await attach([...$("file").files]); $("file").value = ""; });
  $("question").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    attach(files);
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault(); // else the browser leaves the page
    attach([...event.dataTransfer.files]);
  });
}

export function mayAttachImages(may) {
  takesImages = may;
  $("file").accept = may ? "image/*,text/*,.md,.py,.js,.json,.csv" : "text/*,.md,.py,.js,.json,.csv";
  $("attach").textContent = may ? "Attach" : "Attach text";
}

export function attachedImages() { return images; }
export function setAttached(urls) { images = [...urls]; show(); }
