/** What may constrain an answer: how it is written, checked here, and said to the server. */

export const KINDS = {
  text: { name: "Free text" },
  json_schema: {
    name: "JSON Schema",
    help: "Tab indents; Esc, then Tab leaves the field.",
  },
  regex: { name: "Regex", help: "The whole answer matches, from its first to its last character." },
  choice: { name: "Choice", label: "Choices", help: "One choice a line; the answer is one of them." },
  grammar: { name: "EBNF", label: "Grammar in EBNF (GBNF)", help: "The answer is derived from the rule root." },
  lark: { name: "Lark", label: "Grammar in Lark", help: "The answer is derived from the rule start." },
};

/** The choices of a text with one a line. */
export function choices(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean);
}

/** What is wrong with the text of a guide as far as can be told here, or null. */
export function localError(kind, text) {
  if (kind === "text") return null;
  if (!text.trim()) return "It is empty.";
  if (kind !== "json_schema") return null;
  const problem = jsonError(text);
  if (problem) return problem;
  const schema = JSON.parse(text);
  const fits = typeof schema === "boolean" || (schema && typeof schema === "object" && !Array.isArray(schema));
  return fits ? null : "A schema is an object, or true or false.";
}

const SPACE = /[ \t\n\r]*/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const SCALAR = /(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)(?![\w.])/y;

/** Where a text ceases to be JSON, or null. Browsers do not always say where. */
export function jsonError(text) {
  let at = 0;
  const take = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) at = pattern.lastIndex;
    return found;
  };
  const need = (found, wanted) => {
    if (!found) throw wanted;
  };
  const items = (end, name, item) => {
    take(SPACE);
    if (take(end)) return;
    do item(); while (take(/,/y));
    need(take(end), `a comma or ${name}`);
  };
  const pair = () => {
    take(SPACE);
    need(take(STRING), "a name in double quotes");
    take(SPACE);
    need(take(/:/y), "a colon");
    value();
  };
  const value = () => {
    take(SPACE);
    if (take(/\{/y)) items(/\}/y, "}", pair);
    else if (take(/\[/y)) items(/\]/y, "]", value);
    else need(take(STRING) ?? take(SCALAR), "a JSON value");
    take(SPACE);
  };
  try {
    value();
    need(at === text.length, "nothing more");
    return null;
  } catch (wanted) {
    if (typeof wanted !== "string") return "It is nested too deeply.";
    const before = text.slice(0, at).split("\n");
    return `Line ${before.length}, column ${before.at(-1).length + 1}: here should be ${wanted}.`;
  }
}

/**
 * The fields of a request that carry the guide, as JSON text without the outer braces. The text of a
 * schema goes as it stands: parsed and written again, integer-like keys would change their order and
 * long numbers their digits.
 */
export function guideFields({ kind, guide, strict, backend }) {
  const auto = !backend || backend === "auto";
  if (kind === "text") return "";
  if (kind === "json_schema") {
    if (auto) {
      const flag = strict ? `"strict":true,` : "";
      return `"response_format":{"type":"json_schema","json_schema":{"name":"answer",${flag}"schema":${guide}}}`;
    }
    const closed = strict ? `,"disable_additional_properties":true` : "";
    return `"structured_outputs":{"json":${guide},"backend":${JSON.stringify(backend)}${closed}}`;
  }
  const value = kind === "choice" ? choices(guide) : guide;
  return `"structured_outputs":${JSON.stringify(auto ? { [kind]: value } : { [kind]: value, backend })}`;
}
