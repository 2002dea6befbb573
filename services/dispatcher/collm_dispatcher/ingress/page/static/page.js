// Draws what /live/stream sends once a second.

import { legend, plot, spark } from "./charts.js";
import { h, show } from "./dom.js";

const STATES = ["serving", "combined", "idle", "away"];
const KEPT_S = 20;
const place = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const seen = [];

const number = (value, digits = 1) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const percent = (value, digits = 0) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`);
const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
const bytes = (value) => (value === null ? "–" : value >= 2 ** 30 ? `${fixed(value / 2 ** 30, 1)} GiB` : `${fixed(value / 2 ** 20, 0)} MiB`);
const empty = (text) => h("p", { class: "empty" }, text);

function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${fixed(seconds / 3600, 1)} h`;
}

function limits(slo) {
  if (!slo) return "limits of its own";
  const told = [["ttft_s", "first token"], ["tpot_s", "per token"], ["e2e_s", "whole"]]
    .filter(([name]) => slo[name]).map(([name, text]) => `${text} ${slo[name] < 1 ? `${number(1000 * slo[name], 0)} ms` : `${number(slo[name])} s`}`);
  return told.join(" · ") || "no limits";
}

// --- at a glance

function goodput(view) {
  const total = sum(view.streams.map((stream) => stream.goodput_tokens ?? 0));
  seen.push([view.time_s, total]);
  while (seen.length > 2 && view.time_s - seen[0][0] > KEPT_S) seen.shift();
  const [then, before] = seen[0];
  return view.time_s - then >= 2 ? Math.max(0, total - before) / (view.time_s - then) : null;
}

function tile(title, value, unit, ...rest) {
  return h("div", { class: "tile" }, h("h3", {}, title),
    h("p", { class: "big" }, value, unit ? h("small", {}, ` ${unit}`) : null), ...rest);
}

function glance(view) {
  const offered = sum(view.streams.map((stream) => stream.offered ?? 0));
  const judged = view.streams.filter((stream) => stream.attainment !== null);
  const weight = sum(judged.map((stream) => stream.offered));
  const met = weight ? sum(judged.map((stream) => stream.attainment * stream.offered)) / weight : null;
  const up = view.replicas.filter((replica) => replica.alive && replica.ready);
  const running = sum(view.replicas.map((replica) => replica.running ?? 0));
  const waiting = sum(view.streams.map((stream) => stream.waiting ?? 0));
  const good = goodput(view);
  show(place("glance"),
    tile("Output", number(view.tokens_per_s), "tokens/s", view.tokens.length > 1
      ? spark(view.tokens, { label: "Output tokens per second over the last five minutes" }) : null),
    tile("SLO attainment", percent(met, met === 1 ? 0 : 1), "", h("p", { class: "more" },
      offered ? `of ${number(offered)} requests here; goodput ${number(good)} tokens/s` : "no request came in here yet")),
    tile("Requests", number(running), "running", h("p", { class: "more" }, `${number(waiting)} waiting in streams`)),
    tile("Replicas", `${up.length}/${view.replicas.length}`, "ready", share(view.replicas)),
    training(view));
}

const shown = (replica) => (replica.alive && replica.ready ? replica.state : "away");

function share(replicas) {
  const counts = STATES.map((state) => [state, replicas.filter((replica) => shown(replica) === state).length]).filter(([, count]) => count);
  return h("div", {},
    h("div", { class: "share", "aria-hidden": "true" }, counts.map(([state, count]) => h("i", { class: state, style: { "flex-grow": count } }))),
    h("p", { class: "more" }, counts.map(([state, count]) => `${count} ${state}`).join(" · ")));
}

function training(view) {
  const job = view.jobs.find((each) => !["done", "failed"].includes(each.status));
  if (!job) return tile("Fine-tuning", "none", "", h("p", { class: "more" }, view.jobs.length ? `last job ${view.jobs[0].status} ${span(view.time_s - view.jobs[0].changed_s)} ago` : "no job yet"));
  const losses = Object.values(job.losses).map((curve) => curve[curve.length - 1][1]);
  const loss = losses.length ? ` · loss ${fixed(sum(losses) / losses.length, 2)}` : "";
  return tile("Fine-tuning", `round ${job.round}`, "", h("p", { class: "more" }, `${job.adapter || job.id}: ${job.status}${loss}`));
}

// --- replicas

function replicas(view) {
  show(place("replicas"), view.replicas.length ? view.replicas.map((replica) => card(replica, view)) : empty("No replica has registered yet."));
}

function card(replica, view) {
  const versions = Object.entries(replica.versions);
  return h("article", { class: "card replica", "aria-label": `Replica ${replica.id}` },
    h("header", {}, h("h3", {}, replica.id), badge(shown(replica)),
      h("span", { class: "rate" }, h("b", {}, number(replica.tokens_per_s)), " tokens/s")),
    gauge("load", percent(replica.utilisation), replica.load.length > 1
      ? spark(replica.load, { top: 1, label: `Load of ${replica.id} over the last five minutes` }) : h("div", { class: "spark" })),
    gauge("batch", `${fixed(replica.mean_batch, 1)} / ${number(replica.limit)}`, batch(replica)),
    h("dl", {},
      fact("running", number(replica.running)),
      fact("not answered", number(replica.sent)),
      fact("training B", replica.train ? number(replica.train) + (replica.sm_share < 1 ? ` at ${percent(replica.sm_share)}` : "") : "–"),
      fact("quality Q", fixed(replica.quality, 3)),
      fact("memory", bytes(replica.memory_bytes)),
      fact("heard", replica.reported_s === null ? "never" : `${span(Math.max(0, view.time_s - replica.reported_s))} ago`)),
    h("p", { class: "chips" }, versions.length ? versions.map(([name, version]) => chip(name, version)) : h("span", { class: "chip plain" }, "base model only")));
}

const badge = (state) => h("span", { class: `badge ${state}` }, state);
const chip = (name, version) => h("span", { class: "chip" }, name, h("b", {}, `v${version}`));
const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
const gauge = (name, value, picture) => h("div", { class: "gauge" }, h("span", {}, name), picture, h("b", {}, value));

function batch(replica) {
  const part = (value) => `${Math.min(100, (100 * (value ?? 0)) / replica.limit_max)}%`;
  return h("div", {
    class: "track", role: "meter", "aria-label": "mean running batch, of the limit b", "aria-valuemin": 0,
    "aria-valuemax": replica.limit_max, "aria-valuenow": fixed(replica.mean_batch ?? 0, 1),
    title: `mean ${fixed(replica.mean_batch, 1)}, limit b ${number(replica.limit)}, at most ${replica.limit_max}`,
  }, replica.limit === null ? null : h("i", { class: "allowed", style: { width: part(replica.limit) } }), h("i", { class: "used", style: { width: part(replica.mean_batch) } }));
}

// --- state timeline

function timeline(view) {
  const lanes = Object.entries(view.lanes), whole = view.time_s - view.since_s;
  if (!lanes.length) return show(place("timeline"), empty("No replica has registered yet."));
  const at = (time) => `${(100 * (Math.max(time, view.since_s) - view.since_s)) / whole}%`;
  const width = (from, to) => `${(100 * (to - Math.max(from, view.since_s))) / whole}%`;
  const published = view.adapters.flatMap((adapter) => adapter.published.map((version) => [adapter.name, version]))
    .filter(([, version]) => version.time_s >= view.since_s);
  const marks = () => published.map(([name, version]) => h("u", { style: { left: at(version.time_s) }, title: `${name} v${version.version} at ${clock(version.time_s)}` }));
  return show(place("timeline"),
    lanes.map(([id, spans]) => h("div", { class: "lane" }, h("span", {}, id),
      h("div", { class: "spans", role: "img", "aria-label": `${id}: ${spans.map((each) => `${each.state} ${span(each.to_s - each.from_s)}`).join(", ")}` },
        spans.filter((each) => each.to_s > view.since_s).map((each) => h("i", {
          class: each.state, style: { left: at(each.from_s), width: width(each.from_s, each.to_s) },
          title: `${each.state}, ${span(each.to_s - each.from_s)} from ${clock(each.from_s)}`,
        }, (each.to_s - Math.max(each.from_s, view.since_s)) / whole > 0.16 ? each.state : "")),
        marks()))),
    h("div", { class: "lane axis", "aria-hidden": "true" }, h("span", {}),
      h("div", {}, [1, 2 / 3, 1 / 3].map((part) => `${span(part * whole)} ago`).concat("now").map((text) => h("small", {}, text)))),
    h("ul", { class: "legend" }, STATES.map((state) => h("li", {}, h("i", { class: `box ${state}` }), state)),
      h("li", {}, h("i", { class: "published" }), "a version is published")));
}

// --- streams and adapters

const cell = (name, ...content) => h("td", { "data-name": name }, ...content);

function streams(view) {
  if (!view.streams.length) return show(place("streams"), empty("No request came in yet."));
  const several = view.models.length > 1;
  return show(place("streams"), h("table", {},
    h("thead", {}, h("tr", {}, ["objective", "waiting", "offered", "attainment"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, view.streams.map((stream) => h("tr", {},
      h("th", { scope: "row" }, stream.name, h("small", {}, (several ? `${stream.model} · ` : "") + (stream.name === "other" ? "all other objectives" : limits(stream.limits)))),
      cell("waiting", h("b", { class: stream.waiting > 0 ? "warn" : null }, number(stream.waiting))),
      cell("offered", number(stream.offered)),
      cell("attainment", met(stream)))))));
}

function met(stream) {
  if (stream.attainment === null) return "–";
  return h("span", { class: "met" }, percent(stream.attainment, stream.attainment === 1 ? 0 : 1),
    h("span", { class: "track", "aria-hidden": "true" }, h("i", { class: `used ${stream.attainment < 0.9 ? "bad" : ""}`, style: { width: percent(stream.attainment).replace(" ", "") } })));
}

function adapters(view) {
  if (!view.adapters.length) return show(place("adapters"), empty("No adapter has a name yet."));
  return show(place("adapters"), view.adapters.map((adapter) => {
    const judged = adapter.published.filter((version) => version.after !== null);
    return h("article", { class: "adapter" },
      h("header", {}, h("h3", {}, adapter.name), h("span", { class: "chip" }, "current", h("b", {}, `v${adapter.version}`)), h("small", {}, `on ${adapter.model}`)),
      h("p", { class: "more" }, adapter.version ? holders(adapter) : "not trained yet: it answers as the base model"),
      judged.length ? h("ol", { class: "versions" }, judged.slice(-4).reverse().map((version) => h("li", {},
        h("b", {}, `v${version.version}`), ` held-out cross-entropy ${fixed(version.before, 3)} → ${fixed(version.after, 3)}`, h("small", {}, ` ${span(view.time_s - version.time_s)} ago`)))) : null);
  }));
}

function holders(adapter) {
  const told = Object.entries(adapter.holders).map(([version, ids]) => `v${version} on ${ids.join(", ")}`);
  return told.join("; ") || "no replica has loaded it";
}

// --- jobs

function jobs(view) {
  const note = "No job yet: replicas that the load does not need fall idle, and three idle ones train together.";
  show(place("jobs"), view.jobs.length ? view.jobs.map((job) => jobCard(job, view)) : h("div", { class: "card" }, empty(note)));
}

function jobCard(job, view) {
  const ended = ["done", "failed"].includes(job.status);
  const curves = Object.entries(job.losses), names = curves.map(([name]) => name);
  const [from, to] = [Math.min, Math.max].map((edge) => edge(...curves.flatMap(([, points]) => points.map(([at]) => at))));
  const marks = view.adapters.filter((adapter) => adapter.name === job.adapter).flatMap((adapter) => adapter.published)
    .filter((version) => version.time_s >= from && version.time_s <= to).map((version) => ({ x: version.time_s, title: `v${version.version}` }));
  return h("article", { class: "card job", "aria-label": `Job ${job.id}` },
    h("header", {}, h("h3", {}, job.adapter || job.id), h("span", { class: `badge ${ended ? (job.status === "failed" ? "away" : "idle") : "combined"}` }, job.status),
      h("small", {}, `round ${job.round} · ${job.reason} · ${ended ? `ended ${span(view.time_s - job.changed_s)} ago` : `for ${span(view.time_s - job.started_s)}`} · job ${job.id}`)),
    curves.some(([, points]) => points.length > 1)
      ? h("figure", {}, h("figcaption", {}, "training loss, nats", legend(names.map((name, hue) => ({ name, hue })))),
        plot({
          lines: curves.map(([name, points], hue) => ({ name, points, hue })), marks,
          xLabel: clock, yLabel: (value) => number(value, 2),
          label: `Training loss: ${curves.map(([name, points]) => `${name} from ${fixed(points[0][1], 2)} to ${fixed(points[points.length - 1][1], 2)}`).join("; ")}`,
        }))
      : empty("No loss is known yet."),
    job.rounds.length ? rounds(job) : null);
}

function rounds(job) {
  return h("table", { class: "rounds" },
    h("thead", {}, h("tr", {}, ["round", "updates", "mean loss", "held-out", "version"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, job.rounds.map((round) => {
      const losses = Object.values(round.uploads);
      return h("tr", {}, h("th", { scope: "row" }, `round ${round.number}`), cell("updates", number(losses.length)),
        cell("mean loss", losses.length ? fixed(sum(losses) / losses.length, 3) : "–"),
        cell("held-out", fixed(round.held_out, 3)),
        cell("version", round.version === null ? "–" : h("span", { class: "chip" }, round.published ? "published" : "candidate", h("b", {}, `v${round.version}`))));
    })));
}

// --- latency model

function fits(view) {
  const known = view.fits.filter((fit) => fit.measured.length);
  show(place("fits"), known.length ? known.map(fitCard) : h("div", { class: "card" }, empty("No engine iteration has been measured lately.")));
}

function fitCard(fit) {
  const sizes = [...new Set([...fit.measured.map((point) => point.train), ...Object.keys(fit.lines).map(Number)])].sort((a, b) => a - b);
  const hue = (train) => sizes.indexOf(Number(train));
  const told = fit.r2 === null ? "no model yet" : `off by ${percent(fit.error)} · R² ${fixed(fit.r2, 2)}${fit.sure ? "" : " · slopes partly borrowed"}`;
  return h("article", { class: "card fit", "aria-label": `Latency of ${fit.replica}` },
    h("header", {}, h("h3", {}, fit.replica), h("small", {}, told)),
    plot({
      lines: Object.entries(fit.lines).map(([train, points]) => ({ points, hue: hue(train) })),
      dots: fit.measured.map((point) => ({ x: point.infer, y: point.seconds, hue: hue(point.train) })),
      from: 0, xLabel: (value) => `b = ${value}`, yLabel: (value) => `${number(1000 * value, 1)} ms`,
      label: `${fit.measured.length} measured batch sizes of ${fit.replica}; ${told}`,
    }),
    legend(sizes.map((train) => ({ name: train ? `training, B = ${train}` : "not training", hue: hue(train), kind: "both" }))));
}

// --- events

function news(view) {
  show(place("news"), view.news.length ? h("ol", { class: "events" }, view.news.map((item) => h("li", {},
    h("time", { datetime: new Date(item.time_s * 1000).toISOString() }, clock(item.time_s)), h("i", { class: `kind ${item.kind}` }), h("span", {}, item.text)))) : empty("Nothing happened yet."));
}

// --- the line to the service

function link(state, text) {
  const told = place("link");
  told.dataset.link = state;
  if (told.textContent !== text) told.textContent = text;
}

let last = 0;

function draw(view) {
  last = view.time_s;
  place("models").textContent = view.models.join(" · ");
  for (const part of [glance, replicas, timeline, streams, adapters, jobs, fits, news]) part(view);
  place("main").dataset.ready = "yes";
}

const since = () => (last ? `; figures are of ${clock(last)}` : "");
const source = new EventSource("/live/stream");
source.onmessage = (event) => {
  const view = JSON.parse(event.data);
  if (view === null) return link("away", `the broker is away${since()}`);
  draw(view);
  return link("live", "live");
};
source.onerror = () => link("away", `connection lost, trying again${since()}`);
