/** Pictures on canvases, in the colours of the style sheet. */

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "gray";
}

/** Calls draw(context, width, height), in CSS pixels, on an empty canvas as sharp as the screen. */
export function paint(canvas, draw) {
  const ratio = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  draw(context, width, height);
}

/**
 * What a cache holds of a text.
 * facts: policy, decode, sinks, kept, window; prompt, position: tokens of the prompt, and so far.
 */
export function occupancy(facts, prompt, position) {
  const bounded = facts.policy !== "full" && facts.policy !== "quest";
  const sinks = Math.min(position, facts.sinks);
  const beyond = Math.max(0, position - facts.sinks - facts.window);
  // The kept places are filled from the prompt, or by whatever leaves the window.
  const competes = facts.decode ?? ["h2o", "tova"].includes(facts.policy);
  const candidates = competes ? beyond : prompt - facts.sinks - facts.window;
  const kept = Math.min(facts.kept, Math.max(0, candidates));
  const ring = Math.min(position - sinks, facts.window);
  return {
    sinks,
    kept,
    ring,
    head: bounded ? Math.max(0, position - facts.sinks) % facts.window : ring,
    turns: bounded ? Math.floor(Math.max(0, position - facts.sinks) / facts.window) : 0,
    evicted: bounded ? beyond - kept : 0,
    /** Whether the token in a cell of the ring belongs to the answer. */
    isAnswer: (cell) => {
      const last = position - facts.sinks - 1; // of the ring's tokens, counted from its first
      return last - ((last - cell) % facts.window) + facts.sinks >= prompt;
    },
  };
}

/** sinks | kept | ring, each cell a token where there is room. */
export function drawCache(canvas, facts, held, fresh) {
  paint(canvas, (context, width, height) => {
    const gap = 8;
    const parts = [facts.sinks, facts.kept].filter(Boolean);
    const total = facts.sinks + facts.kept + facts.window;
    const least = 22;
    const free = width - parts.length * gap;
    const smaller = parts.map((cells) => Math.min(free / 3, Math.max(least, (free * cells) / total)));
    const ringWidth = free - smaller.reduce((a, b) => a + b, 0);
    let left = 0;
    const part = (cells, wide, fill) => {
      const cell = wide / cells;
      const line = cell > 3 ? 1 : 0;
      if (!line) {
        context.fillStyle = color("--empty");
        context.fillRect(left, 6, wide, height - 6);
      }
      const step = Math.max(1, Math.floor(cells / wide)); // no more rectangles than pixels
      for (let i = 0; i < cells; i += step) {
        const shade = fill(i);
        if (!shade && !line) continue;
        context.fillStyle = color(shade ?? "--empty");
        context.fillRect(left + i * cell, 6, Math.max(cell * step - line, 0.75), height - 6);
      }
      left += wide + gap;
    };
    if (facts.sinks) part(facts.sinks, smaller[0], (i) => (i < held.sinks ? "--sink" : null));
    if (facts.kept) part(facts.kept, smaller.at(-1), (i) => (i < held.kept ? "--kept" : null));
    const start = left;
    part(facts.window, ringWidth, (i) => (i >= held.ring ? null : held.isAnswer(i) ? "--now" : "--past"));
    if (fresh || held.head >= facts.window) return;
    const x = start + ((held.head + 0.5) * ringWidth) / facts.window;
    context.fillStyle = color("--head");
    context.fillRect(Math.min(x, width - 1) - 1, 4, 2, height - 4);
    context.beginPath();
    context.moveTo(x - 5, 0);
    context.lineTo(x + 5, 0);
    context.lineTo(x, 6);
    context.fill();
  });
}
