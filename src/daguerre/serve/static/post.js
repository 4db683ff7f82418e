// What a page asks the server to change: the header is one that a page of another site cannot send.
export const post = (address, body) =>
  fetch(address, { method: "POST", headers: { "x-daguerre": "1" }, body: JSON.stringify(body) });
