// HTML and SVG elements built without markup strings: no name or label of a task can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that are functions are listeners; null, undefined and false are left out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Set a text only where it differs, so that live regions announce changes alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A custom property for the style sheet: the content security policy forbids style attributes, not this. */
export function styled(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, value);
  return element;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
