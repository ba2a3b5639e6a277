const DATA = JSON.parse(document.getElementById("data").textContent);
const SITES = { "encoder-self": "Encoder", "decoder-self": "Decoder", cross: "Cross" };
const KINDS = { mixed: "Mixed head", source: "Source head", part: "Contribution" };
const state = { sentence: 0, site: "cross", layer: -1, kind: "mixed", head: 0, from: 0, token: 1, minus: false };
let sentences; // with all weights unpacked, and each token isolated from the direction of the others

const find = (query, inside = document) => inside.querySelector(query);
const range = (n) => [...Array(n).keys()];
const number = (x, digits = 2) => x.toFixed(digits).replace(/^-(0\.0*)$/, "$1").replace("-", "−");
const largest = (values) => values.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
const sum = (values) => values.reduce((all, x) => all + x, 0);
const between = (least, x, most) => Math.max(least, Math.min(most, x));
const choose = (change) => draw(Object.assign(state, change));
const quoted = (text) => `“${text}”`;
const isolated = (tokens) => tokens.map((text) => `\u2068${text}\u2069`);

// Return an attention with a list of weights [Nq * Nk] for `source` and `mixed`, and with factor(t, j, i) = M_t[j, i].
function unpack(bytes, { encoder_reads, decoder_reads, decoder_predicts }, attention) {
  const floats = ({ at, shape }) => new Float32Array(bytes.slice(at, at + 4 * shape.reduce((a, b) => a * b)).buffer);
  const heads = ({ at, shape: [count, queries, keys], ...place }) => {
    const [step, zero] = [floats(place.step), floats(place.zero)]; // of each row
    const weights = Float64Array.from(bytes.subarray(at, at + count * queries * keys), (code, k) =>
      (code - zero[Math.floor(k / keys)]) * step[Math.floor(k / keys)]);
    return range(count).map((head) => weights.subarray(head * queries * keys, (head + 1) * queries * keys));
  };
  const { site, layer, mixing, reads_both } = attention;
  const source = heads(attention.source);
  const mixed = mixing ? heads(attention.mixed) : source;
  const steps = decoder_reads.map((read, t) =>
    decoder_predicts[t] === undefined ? read : `${read} → ${decoder_predicts[t]}`);
  const queries = site === "encoder-self" ? encoder_reads : steps;
  const own = site === "decoder-self" ? decoder_reads : encoder_reads;
  const keys = reads_both ? [...encoder_reads, ...decoder_reads] : own;
  const found = { site, layer, mixing, source, mixed, queries, keys };
  if (!mixing) return found;
  const size = source.length * mixed.length;
  const m = floats(mixing);
  const start = mixing.shape.length === 2 ? () => 0 : (t) => t * size;
  return { ...found, factor: (t, j, i) => m[start(t) + j * mixed.length + i] };
}

const inSite = () => sentences[state.sentence].attentions.filter(({ site }) => site === state.site);
const current = () => inSite().find(({ layer }) => layer === state.layer);
const sites = () => [...new Set(sentences[state.sentence].attentions.map(({ site }) => site))];
const rowOf = (values, { keys }) => values.slice(state.token * keys.length, (state.token + 1) * keys.length);

// Return the weights drawn large: the chosen head, or what the chosen source head adds to the chosen mixed head.
function chosen(attention) {
  if (state.kind !== "part") return attention[state.kind][state.head];
  const factorAt = (at) => attention.factor(Math.floor(at / attention.keys.length), state.from, state.head);
  return attention.source[state.from].map((x, at) => x * factorAt(at));
}

// Blue is positive, orange negative, and the card's own colour is 0.
const dark = matchMedia("(prefers-color-scheme: dark)");
const RAMPS = {
  light: [[[255, 255, 255], [107, 168, 222], [11, 54, 112]], [[255, 255, 255], [240, 160, 84], [122, 48, 0]]],
  dark: [[[30, 36, 43], [45, 112, 180], [178, 218, 255]], [[30, 36, 43], [186, 96, 20], [255, 208, 160]]],
};

function colour(x) { // of a number from -1 to 1
  const ramp = RAMPS[dark.matches ? "dark" : "light"][Number(x < 0)];
  const way = 2 * Math.min(1, Math.abs(x)) ** 0.6; // small weights stay visible
  const part = Math.min(1, Math.floor(way));
  return ramp[part].map((start, c) => Math.round(start + (ramp[part + 1][c] - start) * (way - part)));
}

function paint(values, columns, peak) {
  const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: values.length / columns });
  const image = new ImageData(canvas.width, canvas.height);
  values.forEach((x, at) => image.data.set([...colour(x / (peak || 1)), 255], 4 * at));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function legend(target, low, peak, words) {
  const stops = range(11).map((k) => `rgb(${colour((low + ((peak - low) * k) / 10) / (peak || 1))})`);
  const bar = make("i", "", { style: `background: linear-gradient(90deg, ${stops})` });
  target.replaceChildren(number(low), bar, number(peak), make("span", words));
}

const make = (name, text = "", properties = {}) =>
  Object.assign(document.createElement(name), { textContent: text }, properties);

// Fill `target` with a button for each of `options`, a list of values and their names.
function choice(target, options, key) {
  const buttons = options.map(([value, text]) =>
    make("button", text, { id: `${key}-${value}`, ariaPressed: value === state[key],
      onclick: () => choose({ [key]: value }) }));
  target.replaceChildren(target.firstElementChild, ...buttons);
  target.hidden = options.length < 2;
}

function tip(event, text) {
  const box = find("#tip");
  Object.assign(box, { hidden: !text, textContent: text });
  box.style.left = `${between(4, event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.max(4, event.clientY - box.offsetHeight - 8)}px`;
}

// Return an element for each word; that of the place `on` is strong, and a click calls `pick` with its place.
function names(words, on, pick) {
  const look = (at) => ({ title: words[at], className: at === on ? "on" : "", onclick: () => pick?.(at) });
  return words.map((word, at) => make("div", word, look(at)));
}

// Draw a matrix with names of rows and columns. `mark` is the chosen {row, column}; one left out is the whole length.
function heat(target, { values, rows, columns, peak, cell: [width, height], mark = {}, say, pick, label }) {
  const parts = ["heat", "top", "side", "field", "mark"].map((className) => make("div", "", { className }));
  const [whole, top, side, field, box] = parts;
  whole.style = `--width: ${width}px; --height: ${height}px; --columns: ${columns.length}; --rows: ${rows.length}`;
  side.append(...names(rows, mark.row, (row) => pick(row, mark.column ?? 0)));
  top.append(...names(columns, mark.column, (column) => pick(mark.row ?? 0, column)));
  box.hidden = mark.row === undefined && mark.column === undefined;
  box.style = [["column", columns], ["row", rows]].map(([axis, words]) =>
    `--${axis}: ${mark[axis] ?? 0}; --${axis}-span: ${mark[axis] === undefined ? words.length : 1}`).join("; ");
  const canvas = Object.assign(paint(values, columns.length, peak), { role: "img", ariaLabel: label });
  const place = (event) => {
    const { left, top: above } = field.getBoundingClientRect();
    const [column, row] = [Math.floor((event.clientX - left) / width), Math.floor((event.clientY - above) / height)];
    return [between(0, row, rows.length - 1), between(0, column, columns.length - 1)];
  };
  field.onpointermove = field.onpointerdown = (event) => {
    const [row, column] = place(event);
    tip(event, say(row, column, number(values[row * columns.length + column], 3)));
  };
  field.onpointerleave = (event) => event.pointerType === "touch" || tip(event, ""); // a finger is lifted at once
  field.onclick = (event) => pick(...place(event));
  field.append(canvas, box);
  whole.append(make("span"), top, side, field);
  target.replaceChildren(whole);
}

function nameOf({ mixing }, { kind, from, head } = state) {
  if (!mixing) return `head ${head}`;
  return kind === "part" ? `source head ${from} as part of mixed head ${head}` : `${kind} head ${head}`;
}

// Return the places of the largest values, at most `count`.
function strongest(values, count) {
  const order = range(values.length).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  return order.slice(0, count).filter((at) => Math.abs(values[at]) >= 0.005);
}

function drawWords(attention, values) {
  const row = rowOf(values, attention);
  const looks = strongest(row, 3).map((at) => `${quoted(attention.keys[at])} (${number(row[at])})`).join(", ");
  const { kind, token, from, head } = state;
  const most = strongest(row, 1)[0];
  let more = attention.mixing ? "This is before mixing." : "The heads of this attention are not mixed.";
  if (attention.mixing && kind === "mixed" && most !== undefined) {
    const gives = attention.source.map((heads, j) => attention.factor(token, j, head) * rowOf(heads, attention)[most]);
    const first = strongest(gives, 4);
    const terms = first.map((j) => `source head ${j} gives ${number(gives[j])}`).join(", ");
    const rest = sum(gives) - sum(first.map((j) => gives[j]));
    const others = Math.abs(rest) < 0.005 ? "" : `, all others ${number(rest)}`;
    more = `Of the ${number(row[most])}, ${terms}${others}. The row adds up to ${number(sum(row))}.`;
  }
  if (kind === "part") more = `Its factor is M[${from}, ${head}] = ${number(attention.factor(token, from, head), 3)}.`;
  const rest = ` is strongest on ${looks || "nothing"}. ${more}`;
  find("#says").replaceChildren(`At ${quoted(attention.queries[token])}, `, make("b", nameOf(attention)), rest);
  const { encoder_reads, decoder_reads, decoder_predicts } = sentences[state.sentence];
  const translates = encoder_reads.length && decoder_predicts.length;
  const texts = [encoder_reads, translates ? decoder_predicts : decoder_reads].filter(({ length }) => length);
  find("#text").textContent = texts.map((tokens) => tokens.join(" ")).join("  →  ");
}

function drawLines(attention, values) {
  const { queries, keys } = attention;
  const [height, row, peak] = [Math.max(queries.length, keys.length), rowOf(values, attention), largest(values) || 1];
  const lines = Array.from(values, (weight, at) => {
    const [query, key] = [Math.floor(at / keys.length), at % keys.length];
    const x = (Math.abs(weight) / peak) ** 0.6;
    const [width, opacity] = query === state.token ? [0.5 + 6 * x, 1] : [2 * x, 0.4 * x];
    return opacity < 0.02 ? "" : `<line x1="1" y1="${query + 0.5}" x2="99" y2="${key + 0.5}"
      stroke="rgb(${colour(weight / peak)})" stroke-width="${width}" stroke-opacity="${opacity}"/>`;
  });
  const picture = make("div", "", {
    innerHTML: `<svg viewBox="0 0 100 ${height}" preserveAspectRatio="none">${lines.join("")}</svg>`,
  });
  const weights = make("div", "", { className: "weights" });
  weights.append(...names(keys.map((text, at) => `${number(row[at]).padStart(5, "\u2007")}  ${text}`)));
  const read = make("div", "", { className: "side" });
  read.append(...names(queries, state.token, (token) => choose({ token })));
  find("#lines").style = `--height: ${between(19, 420 / height, 34)}px; --rows: ${height}`;
  find("#lines").replaceChildren(read, picture, weights);
  find("#lines-card h2").textContent = `Token by token, ${nameOf(attention)}`;
  legend(find("#lines-card .legend"), values.some((x) => x < 0) ? -peak : 0, peak, "weight; thick: chosen token");
}

function drawMatrix({ queries, keys }, values, name) {
  const peak = largest(values);
  const cell = between(5, Math.floor((find("#matrix").clientWidth - 140) / keys.length), 34);
  heat(find("#matrix"), {
    values, rows: queries, columns: keys, peak, cell: [cell, Math.max(cell, 14)], mark: { row: state.token },
    say: (row, column, x) => `${quoted(queries[row])} looks at ${quoted(keys[column])}: ${x}`,
    pick: (token) => choose({ token }), label: `Weights of ${name}`,
  });
  legend(find("#matrix-card .legend"), values.some((x) => x < 0) ? -peak : 0, peak, "weight");
  find("#matrix-card h2").textContent = `All tokens, ${name}`;
}

function drawMixing(attention) {
  const card = find("#mixing-card");
  document.body.className = `${state.site} ${attention.mixing ? "mixes" : "plain"}`; // chooses among the texts
  if (!attention.mixing) return;
  const { source, mixed, keys, queries, factor } = attention;
  const { kind, head, from, token } = state;
  const minus = state.minus && source.length === mixed.length;
  const [before, after] = [source, mixed].map((heads) => heads.flatMap((values) => [...rowOf(values, attention)]));
  const [sources, mixes] = [source, mixed].map((heads) => heads.map((_, at) => String(at)));
  const m = source.flatMap((_, j) => mixed.map((_, i) => factor(token, j, i) - (minus && i === j)));
  const [weights, factors] = [largest([...before, ...after]), largest(m)];
  const tall = between(11, Math.floor(250 / source.length), 26);
  const all = card.clientWidth;
  const room = all < 760 ? all - 60 : (all - mixed.length * tall - 240) / 2;
  const wide = between(4, Math.floor(room / keys.length), 34);
  const [j, i] = [{ source: head, part: from }[kind], kind === "source" ? undefined : head];
  for (const [which, values, rows, row] of [["source", before, sources, j], ["mixed", after, mixes, i]]) {
    heat(find(`#${which}`), {
      values, rows, columns: keys, peak: weights, cell: [wide, tall], mark: { row },
      say: (at, key, x) => `${which} head ${at} looks at ${quoted(keys[key])}: ${x}`,
      pick: (at) => choose({ kind: which, head: at }), label: `Weights of all ${which} heads at ${queries[token]}`,
    });
  }
  heat(find("#mixing"), {
    values: m, rows: sources, columns: mixes, peak: factors, cell: [tall, tall], mark: { row: j, column: i },
    say: (row, column, x) => `source head ${row} in mixed head ${column}: M${minus ? " − I" : ""} is ${x}`,
    pick: (row, column) => choose({ kind: "part", from: row, head: column }), label: `M at ${queries[token]}`,
  });
  Object.assign(find("#minus"), { ariaPressed: minus, hidden: source.length !== mixed.length });
  const still = attention.mixing.shape.length === 2 ? ", as at all tokens" : "";
  find("h2", card).textContent = `How the heads mix at ${quoted(queries[token])}${still}`;
  legend(find("#of-weights"), -weights, weights, "weights of source and mixed heads");
  legend(find("#of-factors"), -factors, factors, minus ? "M − I" : "M");
}

function drawAll() {
  const kind = state.kind === "source" ? "source" : "mixed";
  const [target, shown] = [find("#all"), [state.sentence, state.site, kind, dark.matches].join()];
  if (target.dataset.shown !== shown) target.replaceChildren(...inSite().map((attention) => pictures(attention, kind)));
  target.dataset.shown = shown;
  for (const button of target.querySelectorAll("button"))
    button.ariaPressed = button.id === `layer-${state.layer}-${state.head}`;
  find("#all-card h2").textContent = `All ${current().mixing ? kind : ""} heads: ${SITES[state.site].toLowerCase()}`;
}

function pictures({ layer, queries, keys, ...heads }, kind) {
  const row = make("div", "", { className: "row" });
  const scale = 72 / Math.max(queries.length, keys.length);
  row.append(make("span", `layer ${layer}`), ...heads[kind].map((values, head) => {
    const canvas = paint(values, keys.length, largest(values));
    canvas.style = `width: ${canvas.width * scale}px; height: ${canvas.height * scale}px`;
    const button = make("button", "", { id: `layer-${layer}-${head}`, title: `layer ${layer}, head ${head}` });
    button.onclick = () => scrollTo({ top: 0, behavior: "smooth" }, choose({ layer, head, kind }));
    button.append(canvas, make("small", String(head)));
    return button;
  }));
  return row;
}

function draw() {
  const id = document.activeElement?.id;
  if (!inSite().length) state.site = sites()[0];
  if (!current()) state.layer = inSite().at(-1).layer;
  const attention = current();
  if (!attention.mixing) state.kind = "mixed";
  const heads = attention[state.kind === "source" ? "source" : "mixed"].map((_, head) => [head, String(head)]);
  state.head = Math.min(state.head, heads.length - 1);
  state.from = Math.min(state.from, attention.source.length - 1);
  state.token = Math.min(state.token, attention.queries.length - 1);
  choice(find("#sites"), sites().map((site) => [site, SITES[site]]), "site");
  choice(find("#layers"), inSite().map(({ layer }) => [layer, String(layer)]), "layer");
  choice(find("#heads"), heads, "head");
  find("#heads span").textContent = state.kind === "part" ? "to mixed head" : "Head";
  choice(find("#kinds"), attention.mixing ? Object.entries(KINDS) : [], "kind");
  choice(find("#sources"), state.kind === "part" ? attention.source.map((_, j) => [j, String(j)]) : [], "from");
  const values = chosen(attention);
  drawWords(attention, values);
  drawMixing(attention);
  drawLines(attention, values);
  drawMatrix(attention, values, nameOf(attention));
  drawAll();
  if (id) document.getElementById(id)?.focus({ preventScroll: true }); // the buttons are new
}

function press(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches("select")) return;
  // Move through `values` by `step`; after the last comes the first.
  const move = (key, values, step) => ({ [key]: values.at((values.indexOf(state[key]) + step) % values.length) });
  const heads = range(current()[state.kind === "source" ? "source" : "mixed"].length);
  const tokens = range(current().queries.length);
  const changes = {
    ArrowLeft: () => move("head", heads, -1),
    ArrowRight: () => move("head", heads, 1),
    ArrowUp: () => move("token", tokens, -1),
    ArrowDown: () => move("token", tokens, 1),
    a: () => move("site", sites(), 1),
    m: () => ({ kind: state.kind === "mixed" ? "source" : "mixed" }),
    i: () => ({ minus: !state.minus }),
    j: () => ({ kind: "part", ...move("from", range(current().source.length), 1) }),
    ...Object.fromEntries(inSite().map(({ layer }) => [layer, () => ({ layer })])),
  };
  if (!(event.key in changes)) return;
  event.preventDefault();
  tip(event, "");
  choose(changes[event.key]());
}

const packed = Uint8Array.from(atob(DATA.blob), (letter) => letter.charCodeAt(0));
const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
sentences = DATA.sentences.map(({ attentions, ...sides }) => {
  const one = Object.fromEntries(Object.entries(sides).map(([side, tokens]) => [side, isolated(tokens)]));
  return { ...one, attentions: attentions.map((attention) => unpack(bytes, one, attention)) };
});
const select = find("#sentences select");
select.append(...sentences.map(({ encoder_reads, decoder_reads }, value) =>
  make("option", (encoder_reads.length ? encoder_reads : decoder_reads).join(" "), { value })));
select.onchange = () => choose({ sentence: Number(select.value), token: 0 });
find("#sentences").hidden = sentences.length < 2;
find("#minus").onclick = () => choose({ minus: !state.minus });
document.addEventListener("keydown", press);
for (const move of ["pointerdown", "scroll"]) document.addEventListener(move, (event) => tip(event, ""), true);
dark.addEventListener("change", draw);
addEventListener("resize", draw);
draw();
