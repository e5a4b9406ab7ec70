"""The page's list of rows: each row folded under its line, filtered and sorted by a small script.

A row's blocks are part of the page up to EMBEDDED_ROWS rows and EMBEDDED_CHARACTERS in all; the blocks of further rows
stand in script files beside the page, loaded when such a row is opened: a page opened as a file may load scripts, and
no other files.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Sequence

from experiments.report.blocks import Block, RowEntry, escaped

EMBEDDED_ROWS, EMBEDDED_CHARACTERS = 200, 3_500_000
FILE_CHARACTERS = 1_500_000  # of one script file
FOLDER = "rows"  # of the script files, beside the page
HEAD = "window.stageReplayRows("  # with which each of them starts
FILTERS = {"diverged": "suffixes part", "answer": "answer changed", "gate": "a gate failed"}
SORTS = {"": "ledger order", "first": "first divergence", "margin": "margin", "drift": "drift, largest first"}

SCRIPT = """\
(function () {
  "use strict";
  var form = document.getElementById("row-filters"), list = document.getElementById("row-list");
  var items = Array.prototype.slice.call(list.children), count = document.getElementById("row-count");
  function value(item, key) {
    var found = item.getAttribute("data-" + key);
    return found === null ? Infinity : key === "drift" ? -Number(found) : Number(found);
  }
  function apply() {
    var key = form.elements.sort.value, run = form.elements.run.value, shown = 0;
    var wanted = Array.prototype.filter.call(form.querySelectorAll("[type=checkbox]"), function (box) {
      return box.checked;
    });
    items.forEach(function (item) {
      var flags = item.getAttribute("data-flags").split(" ");
      item.hidden = (run !== "" && item.getAttribute("data-run") !== run) || wanted.some(function (box) {
        return flags.indexOf(box.value) < 0;
      });
      shown += item.hidden ? 0 : 1;
    });
    var order = key === "" ? items : items.slice().sort(function (a, b) {
      var x = value(a, key), y = value(b, key);
      return x < y ? -1 : x > y ? 1 : items.indexOf(a) - items.indexOf(b);
    });
    order.forEach(function (item) { list.appendChild(item); });
    count.textContent = shown + " of " + items.length + " rows shown";
  }
  function load(details) {
    var body = details.querySelector("[data-file]");
    if (!details.open || !body || body.getAttribute("data-asked")) { return; }
    var script = document.createElement("script"), file = body.getAttribute("data-file");
    body.setAttribute("data-asked", "yes");
    script.setAttribute("src", file);
    script.addEventListener("error", function () {
      body.textContent = "Could not load " + file + ", which belongs beside this page.";
      body.removeAttribute("data-asked");
    });
    document.head.appendChild(script);
  }
  window.stageReplayRows = function (bodies) {
    Object.keys(bodies).forEach(function (anchor) {
      var body = document.getElementById(anchor).querySelector("[data-file]");
      if (body) { body.innerHTML = bodies[anchor]; body.removeAttribute("data-file"); }
    });
  };
  function follow() {
    var target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    var details = target && target.closest("#row-list details");
    if (details) { details.open = true; details.scrollIntoView(); }
  }
  list.addEventListener("toggle", function (event) { load(event.target); }, true);
  form.addEventListener("input", apply);
  form.hidden = false;
  apply();
  window.addEventListener("hashchange", follow);
  follow();
})();
"""


def script_digest() -> str:
    """The script's digest as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()


def browser(rows: Sequence[RowEntry], render: Callable[[Sequence[Block]], str]) -> tuple[str, dict[str, str]]:
    """The section's HTML, and the script files by path. render: blocks of one row to HTML."""
    runs = list(dict.fromkeys(row.run for row in rows))
    items: list[str] = []
    waiting: dict[str, str] = {}
    files: dict[str, str] = {}
    held = 0
    for number, row in enumerate(rows):
        body = render(row.blocks)
        if number < EMBEDDED_ROWS and held + len(body) <= EMBEDDED_CHARACTERS:
            held += len(body)
            items.append(_item(row, runs, f"<div>\n{body}\n</div>"))
            continue
        if waiting and sum(map(len, waiting.values())) + len(body) > FILE_CHARACTERS:
            files[f"{FOLDER}/{len(files)}.js"] = _script_file(waiting)
            waiting = {}
        waiting[row.anchor] = body
        file = f"{FOLDER}/{len(files)}.js"
        note = f"Stands in {file} beside this page; loaded when opened, where scripts may run."
        items.append(_item(row, runs, f'<div data-file="{file}" aria-live="polite"><p>{note}</p></div>'))
    if waiting:
        files[f"{FOLDER}/{len(files)}.js"] = _script_file(waiting)
    listed = "\n".join(items)
    return (
        '<section id="rows" aria-labelledby="rows-title">\n<h2 id="rows-title">Rows, one by one</h2>\n'
        "<p>Open a row for its question, its branches, the suffixes with the first differing token marked, margins, "
        "answers, drift by layer and mask. The same on a terminal: python -m experiments.show RUN ROW.</p>\n"
        f'{_form(runs)}\n<ul id="row-list">\n{listed}\n</ul>\n</section>\n<script>{SCRIPT}</script>',
        files,
    )


def _form(runs: Sequence[str]) -> str:
    """Filters and order; shown by the script, without which they could do nothing."""
    boxes = "".join(f'<label><input type="checkbox" value="{key}"> {label}</label>' for key, label in FILTERS.items())
    sorts = "".join(f'<option value="{key}">{label}</option>' for key, label in SORTS.items())
    names = "".join(f'<option value="{k}">{escaped(name)}</option>' for k, name in enumerate(runs))
    return (
        '<form id="row-filters" hidden aria-label="Filter and sort the rows">\n'
        f'<label>run <select name="run"><option value="">all</option>{names}</select></label>\n'
        f"<fieldset><legend>only rows where</legend>{boxes}</fieldset>\n"
        f'<label>order <select name="sort">{sorts}</select></label>\n'
        '<p id="row-count" role="status"></p>\n</form>'
    )


def _item(row: RowEntry, runs: Sequence[str], body: str) -> str:
    order = "".join(f' data-{key}="{value!r}"' for key, value in row.order.items())
    flags = " ".join(sorted(row.flags))
    facts = "".join(f"<span>{escaped(fact)}</span>" for fact in row.facts)
    return (
        f'<li data-run="{runs.index(row.run)}" data-flags="{flags}"{order}><details id="{escaped(row.anchor)}">'
        f"<summary><b>{escaped(row.key)}</b><span>{escaped(row.run)}</span>{facts}</summary>\n{body}\n</details></li>"
    )


def _script_file(bodies: dict[str, str]) -> str:
    return f"{HEAD}{json.dumps(bodies, ensure_ascii=True)});\n"
