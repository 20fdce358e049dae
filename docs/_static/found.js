// What the search shows of what Sphinx's search finds: each page once, records after the pages that explain, excerpts in plain words.
"use strict";
(() => {
  // RECORDS comes from records.js: how the names of the pages begin that record results
  const isRecord = (page) => RECORDS.some((start) => page.startsWith(start));
  // what a page says of itself is more than a word that it contains: an entry of the index, or the title of the whole page
  const isAsked = ([, title, , , , , kind]) => kind === "index" || (kind === "title" && !title.includes(" > "));

  const perform = Search._performSearch;
  Search._performSearch = (...query) => {
    const best = new Map();
    for (const result of perform(...query).reverse()) if (!best.has(result[0])) best.set(result[0], result);
    const pages = [...best.values()];
    const later = (result) => isRecord(result[0]) && !isAsked(result);
    return [...pages.filter((result) => !later(result)), ...pages.filter(later)].reverse(); // the best is shown last
  };

  const LETTERS = {
    alpha: "α", beta: "β", gamma: "γ", delta: "δ", lambda: "λ", mu: "μ", sigma: "σ", tau: "τ", phi: "φ", omega: "ω", Omega: "Ω", Delta: "Δ",
    sum: "Σ", infty: "∞", le: "≤", leq: "≤", ge: "≥", geq: "≥", neq: "≠", ne: "≠", in: "∈", cdot: "·", times: "×", to: "→", pm: "±",
    propto: "∝", approx: "≈", langle: "⟨", rangle: "⟩", ldots: "…", dots: "…", log: "log", exp: "exp", max: "max", min: "min",
  };
  /** A short formula in letters, as a reader would type it; "…" for one that needs more than letters. */
  const plain = (tex) => {
    const words = tex
      .replace(/^\s*\\[([]|\\[)\]]\s*$/g, "")
      .replace(/\\(?:mathrm|text|operatorname|mathbf)\{([^{}]*)\}/g, "$1")
      .replace(/\\([A-Za-z]+)/g, (whole, name) => LETTERS[name] ?? whole)
      .replace(/\\[,;: !]/g, " ");
    return /[\\{}&]/.test(words) ? "…" : words.trim();
  };

  const GONE = ".headerlink, script, style, .gp, .copybtn, .math.amsmath, div.math, .sphx-glr-timing, .sphx-glr-footer, nav, aside";
  const CODE = "div.highlight, pre";

  /** The words of a page, or of what stands at the anchor: its prose, and where that has none of the words sought, its code too. */
  const words = (html, keywords, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const all = page.querySelector("article.bd-article") ?? page.querySelector('[role="main"]') ?? page.body;
    all.querySelectorAll(GONE).forEach((element) => element.remove());
    all.querySelectorAll("span.math").forEach((element) => element.replaceWith(plain(element.textContent)));
    const at = anchor ? all.querySelector(`#${CSS.escape(anchor.slice(1))}`) : null;
    const content = at?.textContent.trim() ? at : all; // the anchor of an index entry is empty
    const has = (text) => keywords.some((word) => text.toLowerCase().includes(word));
    const prose = content.cloneNode(true);
    prose.querySelectorAll(CODE).forEach((element) => element.remove());
    return (has(prose.textContent) || !has(content.textContent) ? prose : content).textContent.replace(/\s+/g, " ").trim();
  };

  const LENGTH = 240;
  const BEFORE = 100;
  Search.makeSearchSummary = (html, searched, anchor) => {
    const keywords = [...searched].map((word) => word.toLowerCase());
    const text = words(html, keywords, anchor);
    const found = keywords.map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 0);
    const near = Math.max(0, Math.min(...(found.length ? found : [0])) - BEFORE);
    const start = near ? text.indexOf(" ", near) + 1 : 0; // whole words
    const end = start + LENGTH < text.length ? text.lastIndexOf(" ", start + LENGTH) : text.length;
    const summary = document.createElement("p");
    summary.classList.add("context");
    summary.textContent = `${start ? "… " : ""}${text.slice(start, end > start ? end : start + LENGTH)}${end < text.length ? " …" : ""}`;
    return summary;
  };
})();
