// The prefix tree as an icicle on a canvas: a node's width is the tokens of its subtree, its row is its depth.
// Only what is at least half a pixel wide is drawn, so ten thousand nodes cost what the screen can show.
import { span } from "/dashboard/elements.js";

const ROW = 26, MIN_PX = 0.5, MIN_TEXT_PX = 48, ZOOM_MS = 220, HOUR_S = 3600;

export class Tree {
  // `tell` is given a sentence on a node, `list` the number of the chosen one.
  constructor(canvas, tell, list) {
    this.canvas = canvas;
    this.tell = tell;
    this.list = list;
    this.nodes = [];
    this.view = { from: 0, to: 1, row: 0 };
    this.chosen = 0;
    this.frames = 0;
    this.numDrawn = 0;
    canvas.addEventListener("click", (e) => { this.choose(this.at(e)); this.zoom(this.chosen); });
    canvas.addEventListener("mousemove", (e) => { const n = this.at(e); if (n !== null) this.say(n); });
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    canvas.addEventListener("keydown", (e) => this.key(e));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // `data` as /admin/tree gives it. Node 0 is the sum of all; namespaces are its children.
  set(data) {
    const root = { label: "the whole cache", own: 0, parent: -1, children: [], row: 0, age: null, below: "" };
    const nodes = [root];
    data.namespaces.forEach((space, i) => {
      const label = space.owner || (space.has_salt ? `salt ${i}` : "default namespace");
      nodes.push({ label: space.adapter ? `${label}, adapter ${space.adapter}` : label, own: 0, parent: 0,
        children: [], row: 1, age: null, below: "" });
      root.children.push(nodes.length - 1);
    });
    if (data.namespace.includes(data.namespaces.length)) { // nobody here knows what is before these blocks
      nodes.push({ label: "beginning unknown", own: 0, parent: 0, children: [], row: 1, age: null, below: "" });
      root.children.push(nodes.length - 1);
    }
    const first = nodes.length;
    data.parent.forEach((parent, i) => {
      const up = parent < 0 ? 1 + data.namespace[i] : first + parent;
      nodes.push({ label: data.text[i] ?? "", own: data.tokens[i], parent: up, children: [], row: nodes[up].row + 1,
        age: data.age_s[i], below: data.below[i], start: data.start[i], pinned: data.pinned[i],
        onDevice: data.on_device?.[i] ?? true });
      if (!nodes.at(-1).onDevice) nodes.at(-1).label = `only on ${data.below[i].replace(" ", " and ")}`;
      nodes[up].children.push(nodes.length - 1);
    });
    for (const node of nodes) node.total = node.own;
    for (let i = nodes.length - 1; i > 0; i--) {
      const up = nodes[nodes[i].parent];
      up.total += nodes[i].total;
      if (nodes[i].age !== null && (up.age === null || nodes[i].age < up.age)) up.age = nodes[i].age;
    }
    root.x = 0;
    root.w = 1;
    for (const node of nodes) {
      node.children.sort((a, b) => nodes[b].total - nodes[a].total);
      // A node's own tokens are shared by all below it: the children divide its whole width.
      const sum = node.children.reduce((s, c) => s + nodes[c].total, 0) || 1;
      let x = node.x;
      for (const c of node.children) {
        nodes[c].x = x;
        nodes[c].w = node.w * nodes[c].total / sum;
        x += nodes[c].w;
      }
    }
    this.nodes = nodes;
    this.depth = nodes.reduce((most, node) => Math.max(most, node.row), 0);
    this.chosen = Math.min(this.chosen, nodes.length - 1);
    this.view = { from: 0, to: 1, row: 0 };
    this.draw();
    this.list(this.chosen);
  }

  colours() {
    const style = getComputedStyle(this.canvas);
    const get = (name) => style.getPropertyValue(name).trim();
    return { hot: rgb(get("--hot")), cold: rgb(get("--cold")), ink: get("--ink"), paper: get("--paper"),
      line: get("--line"), accent: get("--accent") };
  }

  draw() {
    const { canvas, nodes } = this;
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.frames++;
    this.numDrawn = 0;
    if (!nodes.length) return;
    const colours = this.colours();
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const { from, to, row } = this.view, scale = width / (to - from);
    const stack = [0];
    while (stack.length) {
      const i = stack.pop(), node = nodes[i];
      const w = node.w * scale;
      if (w < MIN_PX || node.x + node.w < from || node.x > to) continue;
      const y = (node.row - row) * ROW;
      if (y < height) this.descend(pen, node, y + ROW, scale, stack, colours);
      if (y < -ROW || y >= height) continue;
      this.box(pen, node, i, Math.max(0, (node.x - from) * scale), y, Math.min(width, (node.x + node.w - from) * scale),
        colours);
    }
  }

  // Children too narrow to see are the last ones: they are drawn as one, as hot as the hottest of them.
  descend(pen, node, y, scale, stack, colours) {
    const { nodes } = this, { from } = this.view;
    const thin = node.children.findIndex((c) => nodes[c].w * scale < MIN_PX);
    const wide = thin < 0 ? node.children : node.children.slice(0, thin);
    for (const c of wide) stack.push(c);
    if (thin < 0 || y < 0) return;
    const rest = node.children.slice(thin), left = (nodes[rest[0]].x - from) * scale;
    const w = (node.x + node.w - from) * scale - left;
    if (left + w < 0 || left > this.canvas.clientWidth) return;
    const age = rest.reduce((least, c) => Math.min(least, nodes[c].age ?? Infinity), Infinity);
    this.numDrawn++;
    pen.fillStyle = heat(age === Infinity ? null : age, colours);
    pen.fillRect(left, y, Math.max(w, MIN_PX), ROW - 1);
  }

  box(pen, node, i, left, y, right, colours) {
    const w = right - left;
    this.numDrawn++;
    const isHollow = node.onDevice === false && w > 6;
    const fill = heat(node.age, colours), writing = isHollow ? colours.ink : contrast(fill);
    pen.fillStyle = pen.strokeStyle = fill;
    if (isHollow) { // no bytes of it are on the device
      pen.lineWidth = 2;
      pen.strokeRect(left + 1, y + 1, w - 3, ROW - 3);
    } else pen.fillRect(left, y, Math.max(w - (w > 3 ? 1 : 0), MIN_PX), ROW - 1);
    if (w > 6 && node.below) pattern(pen, node.below, left, y, w, writing);
    if (i === this.chosen) {
      pen.strokeStyle = colours.accent;
      pen.lineWidth = 3;
      pen.strokeRect(left + 1.5, y + 1.5, Math.max(1, w - 4), ROW - 4);
    }
    if (w > MIN_TEXT_PX && node.label) {
      pen.save();
      pen.beginPath();
      pen.rect(left, y, w - 4, ROW);
      pen.clip();
      pen.fillStyle = writing;
      pen.fillText(node.label.replace(/\s+/g, " "), left + 5, y + ROW / 2);
      pen.restore();
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const { from, to, row } = this.view;
    const x = from + (event.clientX - box.left) / box.width * (to - from);
    const wanted = Math.floor((event.clientY - box.top) / ROW + row);
    let i = 0;
    if (!this.nodes.length) return null;
    while (this.nodes[i].row < wanted) {
      const next = this.nodes[i].children.find((c) => this.nodes[c].x <= x && x < this.nodes[c].x + this.nodes[c].w);
      if (next === undefined) return null;
      i = next;
    }
    return i;
  }

  choose(i) { if (i !== null) { this.chosen = i; this.say(i); this.draw(); this.list(i); } }

  say(i) { this.tell(this.sentence(i)); }

  sentence(i) {
    const node = this.nodes[i];
    const parts = [`${node.total.toLocaleString()} tokens`];
    const place = node.start === null ? "after tokens that nobody here knows" : `from token ${node.start?.toLocaleString()} on`;
    if (node.own) parts.push(`${node.own.toLocaleString()} of its own ${place}`);
    if (node.children.length) parts.push(`${node.children.length.toLocaleString()} branches`);
    if (node.age !== null) parts.push(`used ${span(node.age)} ago`);
    if (node.below && node.onDevice) parts.push(`also on ${node.below.replace(" ", " and ")}`);
    if (node.pinned) parts.push("pinned");
    return `${JSON.stringify(node.label)}: ${parts.join(", ")}`;
  }

  zoom(i) {
    const node = this.nodes[i];
    const visible = Math.floor(this.canvas.clientHeight / ROW);
    const row = this.depth < visible ? 0 : Math.max(0, Math.min(node.row - 1, this.depth - visible + 1));
    this.glide({ from: node.x, to: node.x + Math.max(node.w, 1e-9), row });
  }

  glide(target) {
    const start = this.view, began = performance.now();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { this.view = target; this.draw(); return; }
    const step = (now) => {
      const t = Math.min(1, (now - began) / ZOOM_MS), s = t * t * (3 - 2 * t);
      this.view = { from: start.from + (target.from - start.from) * s, to: start.to + (target.to - start.to) * s,
        row: start.row + (target.row - start.row) * s };
      this.draw();
      if (t < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect(), { from, to, row } = this.view;
    const at = from + (event.clientX - box.left) / box.width * (to - from);
    const by = Math.exp(Math.sign(event.deltaY || event.deltaX) * 0.2);
    const w = Math.min(1, (to - from) * by), left = Math.min(1 - w, Math.max(0, at - (at - from) * w / (to - from)));
    this.view = { from: left, to: left + w, row };
    this.draw();
  }

  key(event) {
    const node = this.nodes[this.chosen];
    if (!node) return;
    const siblings = node.parent < 0 ? [0] : this.nodes[node.parent].children;
    const place = siblings.indexOf(this.chosen);
    const moves = {
      ArrowDown: () => node.children.length && this.choose(node.children[0]),
      ArrowUp: () => node.parent >= 0 && this.choose(node.parent),
      ArrowRight: () => place + 1 < siblings.length && this.choose(siblings[place + 1]),
      ArrowLeft: () => place > 0 && this.choose(siblings[place - 1]),
      Enter: () => this.zoom(this.chosen),
      " ": () => this.zoom(this.chosen),
      Escape: () => { this.choose(Math.max(0, node.parent)); this.zoom(this.chosen); },
      Home: () => { this.choose(0); this.zoom(0); },
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }
}

function heat(age, colours) {
  const cold = age === null ? 1 : Math.min(1, Math.log1p(age) / Math.log1p(HOUR_S));
  const mix = colours.hot.map((hot, k) => Math.round(hot + (colours.cold[k] - hot) * cold));
  return `rgb(${mix.join(",")})`;
}

function rgb(hex) { return [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)); }

function contrast(colour) {
  const [r, g, b] = colour.match(/\d+/g).map(Number);
  return r * 0.299 + g * 0.587 + b * 0.114 > 140 ? "#111111" : "#ffffff";
}

function pattern(pen, below, left, y, w, writing) {
  pen.fillStyle = pen.strokeStyle = `${writing}66`;
  if (below.includes("host")) for (let x = left + 4; x < left + w - 4; x += 8) pen.fillRect(x, y + ROW - 6, 2, 2);
  if (below.includes("disk")) {
    pen.lineWidth = 1;
    pen.beginPath();
    for (let x = left; x < left + w - 5; x += 8) { pen.moveTo(x, y + 5); pen.lineTo(x + 5, y); }
    pen.stroke();
  }
}
