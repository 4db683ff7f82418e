// News of the server as they come. A browser opens six connections to a server, all its tabs together: a tab that nobody
// sees lets go of its own, and only asks from time to time, for its title and its notice.
const AGAIN_MS = 15000;

/** Calls `news` with each message, and `back` when some may have been missed. */
export const follow = (news, back = () => {}) => {
  const lost = document.querySelector(".lost-line");
  let events = null, waiting = 0, missed = false;
  const close = () => { events?.close(); events = null; missed = true; };
  const open = () => {
    clearTimeout(waiting);
    close();
    events = new EventSource("events");
    events.onmessage = (event) => {
      lost.hidden = true;
      news(JSON.parse(event.data));
      if (document.hidden) rest();
    };
    events.onerror = () => {
      lost.textContent = "The server does not answer: what is shown stays as it is, and goes on when it is back.";
      lost.hidden = false;
      missed = true;
    };
    events.onopen = () => {
      lost.hidden = true;
      if (missed && !document.hidden) { missed = false; back(); }
    };
  };
  const rest = () => {
    close();
    clearTimeout(waiting);
    waiting = setTimeout(open, AGAIN_MS);
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? rest() : open()));
  open();
};
