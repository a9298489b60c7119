"""The style sheet of the page: light and dark, narrow and wide, screen and paper. It asks for nothing from outside."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6675; --paper: #fbfaf7; --card: #ffffff; --line: #e1ded5;
  --good: #1d7a46; --bad: #b3311f; --c1: #0072b2; --c2: #e69f00; --c3: #009e73; --c4: #cc79a7; --c5: #d55e00;
  --c6: #56b4e9; --c7: #8a8a8a; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e8e6df; --soft: #a3aab6; --paper: #16191f;
  --card: #1f242c; --line: #363d48; --good: #6fcf97; --bad: #ff8a75; --c1: #4aa8e0; --c2: #f0b53c; --c3: #2cc39a;
  --c4: #e09cc4; --c5: #f08a4b; --c6: #8accf2; --c7: #a5a5a5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.2rem 1.2rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.8rem 0 .6rem; }
article + article { border-top: 3px solid var(--line); margin-top: 4rem; padding-top: 2.2rem; }
p { max-width: 46rem; margin: .5rem 0 .9rem; } .soft, .kicker { color: var(--soft); }
.kicker { margin: 0 0 .3rem; font-size: .9rem; } .note { border-left: 4px solid var(--c1); padding-left: .8rem; }
.warning { border-left: 4px solid var(--c5); padding-left: .8rem; }
a { color: var(--c1); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.3rem 0; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .75rem .95rem;
  color: var(--soft); font-size: .9rem; line-height: 1.4; }
.fact b { display: block; color: var(--ink); font-size: 1.45rem; line-height: 1.3; }
.fact:first-child b { color: var(--c1); font-size: 1.9rem; line-height: 1.15; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1.1rem; margin: 1rem 0;
  font-size: .95rem; }
dt { color: var(--soft); } dd { margin: 0; }
.wide { overflow-x: auto; overflow-wrap: break-word; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .95rem; }
th, td { text-align: left; padding: .4rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; } th:first-child, td:first-child { padding-left: 0; }
.wide td:first-child { min-width: 7.5rem; } .wide .confusion td:first-child { min-width: 2.1rem; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: nowrap; }
tr.best td { font-weight: 700; } td.whole { white-space: nowrap; }
td.share { padding-bottom: .75rem; min-width: 4.6rem; background-image: linear-gradient(var(--c1), var(--c1)),
  linear-gradient(var(--line), var(--line)); background-repeat: no-repeat; background-origin: content-box;
  background-position: left 0 bottom -.4rem; background-size: var(--v) 5px, 100% 5px; background-clip: border-box; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--c1); padding: .3rem 0; }
table.confusion { width: auto; border-collapse: separate; border-spacing: 2px; font-size: .9rem; }
.confusion th, .confusion td { border: 0; padding: .2rem .35rem; }
.confusion td { text-align: center; min-width: 2.1rem; height: 2.1rem; vertical-align: middle; border-radius: .25rem;
  font-variant-numeric: tabular-nums; background: rgba(127, 127, 127, .07); }
.confusion td.strong { color: #fff; } .confusion td.zero { color: transparent; }
.confusion td.right { outline: 1px solid var(--soft); outline-offset: -1px; }
.confusion th.row { text-align: right; white-space: nowrap; max-width: 15rem; overflow: hidden; text-overflow: ellipsis;
  vertical-align: middle; color: var(--ink); }
.confusion th.column span { writing-mode: vertical-rl; transform: rotate(180deg); max-height: 11rem; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; color: var(--ink); }
.heatmap { max-width: 34rem; } .heatmap div { border: 1px solid var(--line); background: var(--card); }
.heatmap img { width: 100%; display: block; aspect-ratio: 1; image-rendering: pixelated; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.2rem 2.2rem;
  align-items: start; } .beside + .soft { margin-top: 1.8rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1rem 1.6rem; }
figure { margin: 0; break-inside: avoid; } figcaption { font-size: .88rem; line-height: 1.45; }
figure.chart { max-width: 34rem; } .chart svg { width: 100%; height: auto; display: block; }
.chart figcaption, .heatmap figcaption { color: var(--soft); padding-top: .3rem; }
.pictures, .pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .8rem;
  margin: .9rem 0; }
.pairs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 15.5rem), 1fr)); }
.pictures figure, .pairs figure { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  overflow: hidden; }
.pictures figure div, .pairs figure div { display: flex; } .pictures img { width: 100%; display: block; }
.pair img { width: 50%; display: block; }
.pictures figcaption, .pairs figcaption { padding: .45rem .6rem .55rem; }
.file { display: block; color: var(--soft); font-size: .92em; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; } figcaption b { color: var(--ink); } .yes { color: var(--good); } .no { color: var(--bad); }
code { font-size: .9em; background: var(--card); border: 1px solid var(--line); border-radius: .3rem;
  padding: .05rem .3rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .7rem .9rem;
  overflow-x: auto; line-height: 1.45; } pre code { border: 0; padding: 0; background: none; overflow-wrap: normal; }
td code { border: 0; padding: 0; background: none; } td.digest { min-width: 19rem; }
td.yes, td.no { font-weight: 700; white-space: nowrap; }
footer { margin-top: 3.5rem; color: var(--soft); font-size: .9rem; }
@media (max-width: 34rem) { main { padding: 1.3rem .9rem 3rem; } h1 { font-size: 1.5rem; }
  .facts { grid-template-columns: 1fr 1fr; } th, td { padding: .4rem .35rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; } .pictures { grid-template-columns: 1fr 1fr; }
  .confusion th.row { max-width: 6rem; }
  .confusion td { min-width: 1.6rem; height: 1.8rem; padding: 0; } td.share { min-width: 3.6rem; }
  .wide td:first-child { min-width: 6.5rem; position: sticky; left: 0; background-color: var(--paper);
    box-shadow: inset 0 -1px var(--line); }
  .wide .confusion td:first-child { position: static; min-width: 1.6rem; } }
@media print { body { background: #fff; font-size: 11pt; } main { max-width: none; padding: 0; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } .wide { overflow: visible; }
  pre { white-space: pre-wrap; } h2 { break-after: avoid; } tr { break-inside: avoid; } }
"""
