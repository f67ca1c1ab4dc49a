"""How a report looks: one style sheet, light and dark, for wide pages and phones."""

__all__ = ["STYLE"]

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#566273;--back:#fff;--card:#f6f8fa;
--rule:#d5dce4;--good:#17663a;--bad:#a3261f;--s0:#1f6feb;--s1:#c2410c;--s2:#0f766e;
--s3:#9333ea;--s4:#a16207;--s5:#be185d;--s6:#4d7c0f;--s7:#475569}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9fadbd;--back:#0d1117;
--card:#161c25;--rule:#303a47;--good:#56d28a;--bad:#ff8b80;--s0:#6cb0ff;--s1:#ff9d5c;
--s2:#4fd1c0;--s3:#c99bff;--s4:#e3b341;--s5:#ff8fc0;--s6:#a6d65c;--s7:#a9b8c8}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:76rem;margin:0 auto;padding:1.25rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:0 .6rem 0 0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.2rem 0 .7rem}
h3{font-size:1rem;margin:0;overflow-wrap:anywhere}
p{margin:.3rem 0}
.soft,figcaption p,dt,footer{color:var(--soft)}
header{display:flex;flex-wrap:wrap;align-items:center;gap:.3rem 0}
header p{flex-basis:100%}
.state{border:1.5px solid currentColor;border-radius:1rem;padding:0 .7rem;
font-weight:600}
.done{color:var(--good)}.interrupted{color:var(--bad)}.running{color:var(--s0)}
.error,.warn{border-left:4px solid var(--bad);background:var(--card);
padding:.5rem .8rem;
margin:.8rem 0;overflow-wrap:anywhere}
.verdict{border-left:4px solid var(--s0);background:var(--card);padding:.7rem .9rem;
margin:1rem 0;font-size:1.06rem;overflow-wrap:anywhere}
.keys{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;
margin:1rem 0}
.keys div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
.keys dt{font-size:.87rem}.keys dd{margin:0;font-size:1.3rem;font-weight:600;
overflow-wrap:anywhere}
.shares{display:flex;height:1.6rem;border-radius:.4rem;overflow:hidden;
background:var(--card)}
.shares i{display:block;min-width:2px;background:var(--c)}
.legend{list-style:none;margin:.2rem 0 0;padding:0;display:flex;flex-wrap:wrap;
gap:.1rem 1rem;font-size:.92rem}
.legend i{display:inline-block;width:1.1rem;height:.28rem;border-radius:2px;
margin-right:.4rem;vertical-align:middle;background:var(--c)}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}
.s4{--c:var(--s4)}.s5{--c:var(--s5)}.s6{--c:var(--s6)}.s7{--c:var(--s7)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));
gap:1rem}
.chart{margin:0;background:var(--card);border-radius:.6rem;padding:.8rem .9rem;
min-width:0}
figcaption p{font-size:.87rem}
.plot{position:relative;margin:.8rem .8rem 2.6rem 4.4rem;height:13rem}
.plot svg{width:100%;height:100%;display:block;overflow:visible}
.plot span{position:absolute;font-size:.8rem;color:var(--soft);white-space:nowrap;
font-variant-numeric:tabular-nums}
.ys span{right:100%;margin-right:.45rem;transform:translateY(50%)}
.xs span{top:100%;margin-top:.25rem;transform:translateX(-50%)}
.xs b{position:absolute;right:0;top:100%;margin-top:1.35rem;font-size:.8rem;
font-weight:400;color:var(--soft)}
svg path{vector-effect:non-scaling-stroke;fill:none}
.grid{stroke:var(--rule);stroke-width:1}
.border{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:4 4}
.line{stroke:var(--c);stroke-width:2.2;stroke-linejoin:round}
.s1 .line,.s3 .line,.s5 .line,.s7 .line{stroke-dasharray:7 4}
.dot{stroke:var(--c);stroke-width:9;stroke-linecap:round;stroke-opacity:0;
pointer-events:stroke}
.few .dot{stroke-width:6;stroke-opacity:1}.dot:hover{stroke-opacity:1;stroke-width:10}
summary{cursor:pointer;color:var(--soft);font-size:.92rem}
.scroll{overflow:auto;max-height:22rem;margin-top:.5rem}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .8rem .25rem 0;text-align:right;
border-bottom:1px solid var(--rule);
white-space:nowrap}
thead th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;
margin:.5rem 0}
.facts dd{margin:0;overflow-wrap:anywhere}
@media (max-width:30rem){.facts{grid-template-columns:1fr;gap:0}.facts dd{
margin-bottom:.5rem}.plot{margin-left:3.7rem}main{padding:1rem .7rem 2rem}}
footer{margin-top:2.5rem;border-top:1px solid var(--rule);padding-top:.8rem;
font-size:.9rem}
"""
