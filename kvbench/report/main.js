// Starts everything, and follows links into it: #point-NAME@FROM-TO, #map-0@TIME.
for (const table of document.querySelectorAll("table")) sortable(table);
for (const input of document.querySelectorAll("[data-filter]")) filtered(input);
if (find("#sweep")) sweep(find("#sweep"));
const showRun = CONTENT.runs.length ? runs(find("#time")) : null;
const players = new Map([...document.querySelectorAll(".player")].map((place) => [place.id, player(place)]));

async function follow() {
  const [, name, part] = /^#([^@]*)(?:@(.*))?$/.exec(decodeURIComponent(location.hash)) || [];
  if (!name) return;
  const point = name.startsWith("point-") && name.slice(6);
  if (point && CONTENT.runs.some((run) => run.point === point)) {
    const view = part?.split("-").map(Number);
    find("#time").scrollIntoView();
    await showRun(point, view?.length === 2 && view.every(Number.isFinite) ? view : null);
  }
  if (players.has(name)) {
    const seek = await players.get(name);
    if (Number.isFinite(Number(part)) && part) seek(Number(part));
    document.getElementById(name).scrollIntoView();
  }
}
window.addEventListener("hashchange", follow);
follow();
