// The built site's own search, outside a browser: `node ask.js FOLDER < QUERIES`, a JSON list, prints for each query the pages that it finds, best first.
"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm");

const folder = process.argv[2];
const queries = JSON.parse(fs.readFileSync(0, "utf8"));
const page = {
  document: { getElementById: () => null },
  localStorage: { setItem: () => undefined },
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (words) => words,
  _ready: () => undefined, // the search is not to begin by itself
  queries,
};
page.window = page;
vm.createContext(page);

// the scripts that the page of the search loads, in its order; those of the theme are for its looks
const loaded = [...fs.readFileSync(path.join(folder, "search.html"), "utf8").matchAll(/<script[^>]*\ssrc="([^"?]+)/g)].map((found) => found[1]);
const own = /(^|\/)(language_data|searchtools|searchindex|records|found)\.js$/;
for (const script of loaded.filter((name) => own.test(name))) {
  vm.runInContext(fs.readFileSync(path.join(folder, script), "utf8"), page, { filename: script });
}
const found = vm.runInContext(
  "queries.map((query) => Search._performSearch(...Search._parseQuery(query)).reverse().map((result) => result[0]))",
  page,
);
console.log(JSON.stringify(found));
