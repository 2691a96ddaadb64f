/** What goes to the server and comes back. Paths are relative: the server may stand behind a prefix. */

/** What the server refused, or could not do, in OpenAI's words. */
export class ApiError extends Error {
  constructor(status, error, retryAfter = null) {
    super(error?.message || `the server answered with HTTP status ${status}`);
    this.status = status;
    this.param = error?.param ?? null;
    this.code = error?.code ?? null;
    this.retryAfter = retryAfter;
  }
}

/** The stream ended before the answer did. */
export class BrokenStream extends Error {}

/** The data of each server-sent event; chunks may end anywhere, within a character as well. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return; // an event without its blank line is not whole
      // A carriage return at the end may be the first half of a line break.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function send(path, { body, key, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const response = await fetch(path, { method, headers, body, signal, credentials: "omit" });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const wait = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  throw new ApiError(response.status, answer.error, Number.isFinite(wait) ? wait : null);
}

export async function getJson(path, options) {
  return (await send(path, options)).json();
}

/** Calls onChunk with each chunk of a streamed completion; throws unless it ends as it should. */
export async function streamChat(body, options, onChunk) {
  const response = await send("v1/chat/completions", { body, ...options });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(response.status, chunk.error);
    onChunk(chunk);
  }
  throw new BrokenStream("The connection ended before the answer did.");
}
