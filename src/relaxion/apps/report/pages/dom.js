// Elements are made here and nowhere else. Everything that comes from data is set as text, never as markup.
"use strict";
const Relaxion = { parts: {} };

// make("p", {class: "small"}, "text", child, ...)
Relaxion.make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return element;
};

Relaxion.svg = (tag, attributes = {}, text = null) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text !== null) element.textContent = String(text);
  return element;
};

let lastIdentity = 0;
Relaxion.identity = (word) => `${word}-${++lastIdentity}`;

// A number as people read it: 3 significant digits, no exponent where none is needed.
Relaxion.number = (value, digits = 3) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(digits - 1).replace("e+", "e").replace("-", "−");
  const text = size >= 1000 ? value.toFixed(0) : Number(value.toPrecision(digits)).toString();
  return text.replace("-", "−");
};

// On an axis with this distance between its marks, or by itself: 20 000 with a thin space.
Relaxion.whole = (value, step = 1) => {
  if (step === 1 && !Number.isInteger(value)) return Relaxion.number(value);
  let digits = 0; // as many as tell two neighbouring marks apart: two for steps of 0.25
  while (digits < 8 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-9) digits += 1;
  return value.toFixed(digits).replace(/\B(?=(\d{3})+(?!\d))(?<!\.\d*)/g, "\u202f").replace("-", "−");
};

// Text in which names with underscores, such as those of settings, stay whole at the end of a line; or whatever else is to be `kept`.
Relaxion.words = (text, kept = /(\w+_\w+)/) => String(text).split(kept).map((piece, k) => (k % 2 ? Relaxion.make("span", { class: "name" }, piece) : piece));

Relaxion.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
Relaxion.still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
