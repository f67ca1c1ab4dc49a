// Replaces the page's content, and opens again what was open, where it was. A reload
// would close all tables and jump.
let last='';
const key=d=>d.closest('figure,section')?.querySelector('h3,h2')?.textContent;
const all=(e,s)=>[...e.querySelectorAll(s)];
async function follow(){let text;
try{const r=await fetch('/',{cache:'no-cache'});if(!r.ok)throw r.status;
text=await r.text()}
catch(e){if(!document.getElementById('silent')){
const p=document.createElement('p');p.id='silent';p.className='warn';
p.textContent='replicax monitor does not answer. What is below may be old.';
document.querySelector('main').prepend(p)}return}
const page=new DOMParser().parseFromString(text,'text/html');
const old=document.querySelector('main'),now=page.querySelector('main');
if(now.innerHTML===last&&!document.getElementById('silent'))return;
last=now.innerHTML;document.title=page.title;
const open=new Set(all(old,'details[open]').map(key));
const places=new Map(all(old,'.scroll').map(d=>[key(d),[d.scrollLeft,d.scrollTop]]));
all(now,'details').forEach(d=>{d.open=open.has(key(d))});
old.replaceWith(now);
all(now,'.scroll').forEach(d=>{[d.scrollLeft,d.scrollTop]=places.get(key(d))||[0,0]})}
setInterval(follow,{{ refresh_ms }})
