"""The page's style sheet, and the palette that figures and page share."""

# name: (light, dark); the style sheet has each as the variable --NAME
PALETTE: dict[str, tuple[str, str]] = {
    "page": ("#fefefe", "#15181c"),
    "ink": ("#1b1f24", "#e7e9ec"),
    "muted": ("#59636e", "#a3acb6"),
    "line": ("#d3d8de", "#3a414a"),
    "panel": ("#f3f5f7", "#1e2329"),
    "first": ("#1f5fa9", "#83b8f3"),
    "second": ("#b4500f", "#f2a46c"),
    "third": ("#2e7d4f", "#83cf9f"),
    "fourth": ("#7a4aa5", "#c6a1ea"),
    "fail": ("#b3141d", "#ff9a94"),
}
SERIES = ("first", "second", "third", "fourth")
ROLE_COLOURS = ("muted", "first", "third", "fourth", "second", "fail")  # by raw role: prompt, branches, merge, answer


def _variables(index: int) -> str:
    return " ".join(f"--{name}: {pair[index]};" for name, pair in PALETTE.items())


VARIABLES = f"""\
:root {{ color-scheme: light dark; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
@media print {{ :root {{ color-scheme: light; {_variables(0)} }} }}
"""
STYLE = f"""\
{VARIABLES}\
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }}
h1, h2, h3, h4 {{ line-height: 1.25; margin: 1.6em 0 .5em; }}
h1 {{ margin-top: .3em; font-size: 1.7rem; }}
h2 {{ border-top: 1px solid var(--line); padding-top: .8em; font-size: 1.35rem; }}
h3 {{ font-size: 1.1rem; }}
p {{ max-width: 46rem; }}
a {{ color: var(--first); }}
a:focus-visible, summary:focus-visible, .scroll:focus-visible, select:focus-visible, input:focus-visible {{
  outline: 2px solid var(--first); outline-offset: 2px; }}
nav ol {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }}
.alert {{ max-width: none; border: 2px solid var(--fail); border-left-width: .6rem; padding: .6rem .9rem;
  color: var(--fail); font-weight: 600; }}
.mild {{ border-color: var(--second); border-width: 0 0 0 .3rem; color: inherit; font-weight: 400;
  background: var(--panel); padding: .3rem .9rem; }}
.verdict {{ max-width: none; border-left: .3rem solid var(--third); padding: .3rem .9rem; background: var(--panel); }}
.scroll {{ overflow-x: auto; margin: 1rem 0; }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding-bottom: .3rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }}
thead th {{ border-bottom: 2px solid var(--muted); }}
tbody th {{ font-weight: 400; color: var(--muted); min-width: 9rem; }}
td {{ min-width: 5rem; max-width: 34rem; }}
.wide {{ width: max-content; }}
.wide td {{ max-width: 17rem; }}
.wide thead th {{ max-width: 8rem; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
  gap: 1.5rem 2.5rem; }}
figure {{ margin: .5rem 0; min-width: 0; }}
figure svg {{ display: block; width: 100%; max-width: 36rem; height: auto; }}
figure.whole {{ grid-column: 1 / -1; overflow-x: auto; }}
figure.whole svg {{ max-width: 52rem; min-width: 36rem; }}
figcaption {{ color: var(--muted); font-size: .9rem; max-width: 36rem; }}
details {{ margin: .6rem 0; }}
summary {{ cursor: pointer; color: var(--muted); font-size: .9rem; }}
.passages h3 {{ font-size: .95rem; margin: 1.2em 0 .4em; }}
.passage {{ border-left: .3rem solid; padding: .1rem .8rem .3rem; margin: .3rem 0; background: var(--panel);
  min-width: 0; }}
.passage b {{ font-size: .8rem; font-weight: 600; color: var(--muted); }}
.passage p {{ margin: .1rem 0; max-width: none; white-space: pre-wrap; font-size: .95rem; }}
.columns {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 0 1rem; }}
mark {{ background: var(--second); color: var(--page); padding: 0 .2em; border-radius: .2em; font-weight: 600;
  outline: 1px solid var(--second); }}
kbd {{ font: .85em ui-monospace, monospace; color: var(--muted); border: 1px solid var(--line); border-radius: .2em;
  padding: 0 .2em; }}
#row-filters {{ display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; padding: .6rem .9rem;
  background: var(--panel); }}
#row-filters[hidden] {{ display: none; }}
#row-filters fieldset {{ border: 0; padding: 0; margin: 0; display: flex; flex-wrap: wrap; gap: .3rem 1rem; }}
#row-filters legend {{ float: left; padding: 0; margin-right: 1rem; color: var(--muted); }}
#row-filters p {{ margin: 0; }}
select, input {{ font: inherit; accent-color: var(--first); }}
#row-list {{ list-style: none; padding: 0; }}
#row-list > li {{ border-bottom: 1px solid var(--line); }}
#row-list details {{ margin: 0; }}
#row-list > li > details > summary {{ color: var(--ink); padding: .45rem .2rem; font-size: .95rem; display: flex;
  flex-wrap: wrap; gap: .1rem 1.4rem; }}
#row-list > li > details > summary::before {{ content: "▸"; color: var(--muted); width: .8rem; }}
#row-list > li > details[open] > summary::before {{ content: "▾"; }}
#row-list summary > span {{ color: var(--muted); }}
#row-list > li > details[open] > summary {{ background: var(--panel); }}
#row-list > li > details > div {{ padding: .2rem .2rem 1.5rem 1rem; }}
@media print {{
  #row-filters {{ display: none; }}
  .passage {{ break-inside: avoid; }}
  mark {{ background: none; color: var(--ink); outline-width: 2px; }}
  body {{ max-width: none; padding: 0; font-size: 9.5pt; }}
  nav {{ display: none; }}
  .scroll {{ overflow: visible; }}
  figure, tr, .alert {{ break-inside: avoid; }}
  h2, h3, caption {{ break-after: avoid; }}
  table {{ font-size: 8pt; }}
  figcaption, summary {{ font-size: 8.5pt; }}
  .wide {{ width: 100%; font-size: 6.5pt; }}
  .wide th, .wide td {{ min-width: 0; max-width: none; padding-right: .4rem; }}
  .figures {{ grid-template-columns: 1fr 1fr; }}
}}
"""
