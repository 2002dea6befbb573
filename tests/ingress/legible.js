// What a reader would stumble over in the page as it is drawn now: nothing, if all three lists are empty.
() => {
  const luminance = (rgb) => rgb.map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const colour = (text) => text.match(/[\d.]+/g).map(Number);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const [red, green, blue, alpha = 1] = colour(getComputedStyle(node).backgroundColor);
      if (alpha === 1) return [red, green, blue];
    }
    return [255, 255, 255];
  };

  const pale = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = texts.nextNode()); ) {
    const own = node.parentElement;
    if (!node.data.trim() || !own.getClientRects().length || own.closest("noscript")) continue;
    const pair = [colour(getComputedStyle(own).color).slice(0, 3), ground(own)].map(luminance).sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < 4.5) pale.push(`${node.data}: ${contrast.toFixed(2)}`);
  }

  const cut = [...document.querySelectorAll("main *, body > header *")].filter((node) => {
    const box = node.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 1 || box.left < -1) && !node.closest("svg, .spans, .track");
  }).map((node) => `${node.tagName}.${node.className}: ${node.textContent.slice(0, 40)}`);

  const parts = ".card, .tile, h2, .card > header, dl > div, td, tbody th, .legend, .gauge > *, .events span, .y span";
  const boxes = [...document.querySelectorAll(parts)].map((node) => [node, node.getBoundingClientRect()]);
  const overlapping = [];
  for (const [a, one] of boxes) for (const [b, two] of boxes) {
    if (a === b || a.contains(b) || b.contains(a)) continue;
    const width = Math.min(one.right, two.right) - Math.max(one.left, two.left);
    const height = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
    if (width > 1 && height > 1) overlapping.push(`${a.textContent.slice(0, 30)} / ${b.textContent.slice(0, 30)}`);
  }
  return { pale, cut, overlapping, wider: document.documentElement.scrollWidth > innerWidth };
}
