// Puts newer parts of the page in the places of the old ones. Everything shown is made, and escaped, by the proxy.
"use strict";

const live = document.getElementById("live");
const waits = document.querySelector(".waits");
const later = new Map(); // parts that came while the reader had one open
const QUIET_MS = 5000; // ticks come each second; a pause longer than this is worth telling
let source = null;
let heard = Date.now();

function say(text, state) {
  live.textContent = text;
  live.dataset.state = state;
}

function reads(part) {
  const selection = document.getSelection();
  const selects = selection && !selection.isCollapsed && part.contains(selection.anchorNode);
  return selects || part.querySelector("details[open]") !== null;
}

function show(name, html) {
  const part = document.getElementById(name);
  if (reads(part)) {
    later.set(name, html);
  } else {
    later.delete(name);
    part.innerHTML = html;
  }
  waits.hidden = !later.has("decisions");
  const title = document.querySelector("[data-title]");
  if (title) document.title = title.dataset.title;
}

function showLater() {
  for (const [name, html] of [...later]) show(name, html);
}

function listen() {
  source = new EventSource("/admin/page/events");
  source.addEventListener("part", (event) => {
    const { name, html } = JSON.parse(event.data);
    show(name, html);
  });
  source.addEventListener("tick", (event) => {
    heard = Date.now();
    say(`live · ${event.data}`, "live");
    showLater();
  });
  source.addEventListener("end", () => say("the proxy is stopping", "lost"));
  source.addEventListener("error", () => {
    const over = source.readyState === EventSource.CLOSED;
    say(over ? "not live: signed out, or too many pages are open; reload" : "connection lost, trying again", "lost");
  });
}

// Nobody waits for the next second after closing what was open. The event does not bubble.
document.addEventListener("toggle", showLater, true);

// A tab that nobody sees holds no stream.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    source.close();
    say("paused", "lost");
  } else {
    heard = Date.now();
    listen();
  }
});

setInterval(() => {
  const silent = Date.now() - heard;
  if (silent > QUIET_MS && live.dataset.state === "live") say(`no news for ${Math.round(silent / 1000)} s`, "lost");
}, 1000);

listen();
