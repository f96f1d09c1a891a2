// Whoever follows a link from another site comes without the cookie of their session: only here it is sent again.

import { address } from "./live.js";

const next = address(document.querySelector("input[name='next']").value), headers = new AbortController();
const answer = await fetch(next, { headers: { Accept: "text/html" }, redirect: "manual", signal: headers.signal }).catch(() => null);
headers.abort(); // the rest of it is for the page itself
if (answer?.ok) location.replace(next);
