// Elements from data, and changes in place: what stays the same keeps its focus, selection and scroll.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "g"]);

export function h(tag, props = {}, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [property, set] of Object.entries(value)) made.style.setProperty(property, set);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function show(place, ...children) {
  const wanted = h("div", {}, ...children);
  children_(place, wanted);
}

function children_(old, wanted) {
  const before = [...old.childNodes], after = [...wanted.childNodes];
  after.forEach((node, index) => (before[index] ? patch(before[index], node) : old.append(node)));
  before.slice(after.length).forEach((node) => node.remove());
}

function patch(old, wanted) {
  if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName) return old.replaceWith(wanted);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return undefined;
  }
  attributes(old, wanted);
  return children_(old, wanted);
}

function attributes(old, wanted) {
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of [...wanted.attributes]) {
    if (name === "style") continue;
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  // The page's security policy forbids style attributes, not styles set by a script.
  if (old.style.cssText !== wanted.style.cssText) old.style.cssText = wanted.style.cssText;
}
