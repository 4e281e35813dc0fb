// Charts of the last minutes, with plotly out of the server's own package.
const TIERS = ["device", "host", "disk", "pool", "computed"];
const SHARES = ["0-9 %", "10-49 %", "50-89 %", "90-100 %"];
const KEPT_S = 900, BUCKET_S = 5;

export class Charts {
  constructor() {
    this.records = [];
    this.counts = [];
    this.isReady = false;
    this.isDrawing = false;
  }

  // Plotly is 5 MB: it loads beside the first figures. Without it the page says what to install.
  async load() {
    try {
      await new Promise((done, failed) => {
        const script = document.createElement("script");
        script.src = "/dashboard/plotly.js";
        script.onload = done;
        script.onerror = () => failed(new Error("charts need plotly: pip install 'stemma-llm[dashboard]'"));
        document.head.append(script);
      });
      this.isReady = true;
    } catch (problem) {
      document.getElementById("charts").textContent = problem.message;
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  take(shown) {
    this.now = shown;
    this.records.push(...shown.ended.filter((one) => one.first_token_s !== null));
    this.records = this.records.filter((one) => one.arrived_at > shown.time - KEPT_S);
    this.counts.push({ time: shown.time, evicted: shown.engine.num_evicted_blocks,
      regretted: shown.engine.num_regretted_blocks });
    this.counts = this.counts.filter((one) => one.time > shown.time - KEPT_S);
    this.draw();
  }

  async draw() {
    if (!this.isReady || !this.now || this.isDrawing || document.hidden) return;
    this.isDrawing = true;
    try {
      for (const [id, make] of [["hits", hits], ["ttft", firstToken], ["fill", fill], ["flow", flow], ["evict", evict]]) {
        const { data, layout } = make(this);
        const part = document.getElementById(id);
        part.setAttribute("role", "img");
        part.setAttribute("aria-label", inWords(part, data));
        await Plotly.react(id, data, { ...look(), ...layout }, { responsive: true, displayModeBar: false });
        // Plotly measures texts in a drawing of its own.
        for (const drawn of document.querySelectorAll(".chart svg, #js-plotly-tester")) drawn.setAttribute("aria-hidden", "true");
      }
    } finally { this.isDrawing = false; }
  }
}

// What a chart shows now, for who can't see it.
function inWords(part, data) {
  const title = part.closest("section").querySelector("h2").textContent;
  const whole = (n) => Math.round(n).toLocaleString("en");
  const said = data.map((one) => {
    if (one.type === "sankey") return one.link.value.map((n, k) =>
      `${whole(n)} from ${one.node.label[one.link.source[k]]} to ${one.node.label[one.link.target[k]]}`).join(", ");
    if (one.type === "box") {
      const sorted = one.y.toSorted((a, b) => a - b);
      return `${one.name} cached: ${sorted.length ? `median ${whole(sorted[sorted.length >> 1])} ms` : "none"}`;
    }
    if (one.orientation === "h") return one.y.map((tier, k) => `${tier} ${one.name} ${whole(one.x[k])}`).join(", ");
    if (one.type === "bar") return `${one.name} ${whole(one.y.reduce((a, b) => a + b, 0))}`;
    return `${one.name} ${whole(one.y.at(-1) ?? 0)} blocks a second`;
  });
  return `${title}: ${said.join("; ") || "nothing yet"}`;
}

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function colour(tier) { return css(`--${tier}`); }

function look() {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true };
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 12 },
    margin: { l: 48, r: 10, t: 8, b: 32 }, xaxis: { ...axis }, yaxis: { ...axis, rangemode: "tozero" },
    legend: { orientation: "h", y: -0.3 }, barmode: "stack" };
}

function hits({ records, now }) {
  const last = Math.floor(now.time / BUCKET_S), first = Math.max(last - KEPT_S / BUCKET_S,
    records.length ? Math.floor(records[0].arrived_at / BUCKET_S) : last);
  const x = Array.from({ length: last - first + 1 }, (_, k) => new Date((first + k) * BUCKET_S * 1000));
  const sums = Object.fromEntries(TIERS.map((tier) => [tier, x.map(() => 0)]));
  for (const one of records) {
    const k = Math.floor(one.arrived_at / BUCKET_S) - first;
    if (k < 0 || k >= x.length) continue;
    for (const [tier, count] of Object.entries(one.by_tier)) sums[tier][k] += count;
    sums.computed[k] += one.prompt_tokens - (one.cached_tokens ?? 0);
  }
  const data = TIERS.filter((tier) => tier === "device" || sums[tier].some((n) => n)).map((tier) => ({ type: "bar", x,
    y: sums[tier], name: tier, marker: { color: colour(tier) } }));
  return { data, layout: {} };
}

function firstToken({ records }) {
  const groups = SHARES.map(() => []);
  for (const one of records) {
    const percent = 100 * (one.cached_tokens ?? 0) / Math.max(1, one.prompt_tokens);
    groups[percent >= 90 ? 3 : percent >= 50 ? 2 : percent >= 10 ? 1 : 0].push(1000 * one.first_token_s);
  }
  const data = groups.map((y, k) => ({ type: "box", y, name: SHARES[k], boxpoints: false, marker: { color: colour("device") } }));
  return { data, layout: { yaxis: { ...look().yaxis, title: { text: "ms" } }, showlegend: false } };
}

function held(engine) {
  const tiers = [["device", engine.num_cached_blocks, engine.num_blocks]];
  for (const [name, tier] of Object.entries(engine.transfer?.tiers ?? {}))
    if (tier.capacity_blocks) tiers.push([name, tier.num_blocks, tier.capacity_blocks]);
  return tiers;
}

function fill({ now }) {
  const tiers = held(now.engine);
  const bar = (name, values, marker) => ({ type: "bar", orientation: "h", y: tiers.map(([tier]) => tier), x: values, name, marker });
  return { data: [bar("held", tiers.map(([, n]) => n), { color: tiers.map(([tier]) => colour(tier)) }),
    bar("free", tiers.map(([, n, all]) => all - n), { color: css("--line") })],
  layout: { showlegend: false, xaxis: { ...look().xaxis, title: { text: "blocks" } } } };
}

// Since the start. A sankey diagram needs each flow's two ends.
function flow({ now }) {
  const { engine } = now, transfer = engine.transfer;
  const names = ["device", ...Object.keys(transfer?.tiers ?? {}), "dropped"];
  const links = [];
  const link = (from, to, value, tier) => { if (value > 0) links.push([names.indexOf(from), names.indexOf(to), value, tier]); };
  for (const [name, tier] of Object.entries(transfer?.tiers ?? {})) {
    link("device", name, tier.writes.stored ?? 0, name);
    link(name, "dropped", tier.num_evicted_blocks + tier.num_expired_blocks, name);
    const loaded = transfer.loaded_blocks[name] ?? 0;
    if (loaded > 0) links.push([names.indexOf(name), names.length, loaded, name]);
  }
  if (!Object.keys(transfer?.tiers ?? {}).length) link("device", "dropped", engine.num_evicted_blocks, "device");
  // Plotly can't lay out a sankey diagram of no flows: it throws.
  if (!links.length) return { data: [], layout: { xaxis: { visible: false }, yaxis: { visible: false },
    annotations: [{ text: "no blocks have moved yet", showarrow: false, font: { size: 14 } }] } };
  const all = [...names, "loaded to the device"];
  return { data: [{ type: "sankey", node: { label: all, pad: 14, thickness: 12,
    color: all.map((name) => colour(TIERS.includes(name) ? name : name.startsWith("loaded") ? "device" : "computed")) },
  link: { source: links.map((l) => l[0]), target: links.map((l) => l[1]), value: links.map((l) => l[2]),
    color: links.map((l) => `${colour(l[3])}66`) } }], layout: {} };
}

function evict({ counts }) {
  const x = counts.slice(1).map((one) => new Date(one.time * 1000));
  const rate = (name) => counts.slice(1).map((one, k) => (one[name] - counts[k][name]) / Math.max(0.1, one.time - counts[k].time));
  const line = (name, label, shade) => ({ type: "scatter", mode: "lines", x, y: rate(name), name: label, line: { color: shade } });
  return { data: [line("evicted", "evicted", colour("host")), line("regretted", "came back within a minute", css("--bad"))],
    layout: { yaxis: { ...look().yaxis, title: { text: "blocks/s" } } } };
}
