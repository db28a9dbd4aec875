"""Envoy's filter that reads the engine's counts of tokens: a Lua script over the end of each answer.

It is called with each chunk and does nothing but to retain the last ones; once an answer has ended, the last object
under a key of counts is searched for them. Envoy's own `sse_to_metadata` parses the JSON of each event instead, and
takes longer. Little is retained: more would cost each event a part of the collector's work.
"""

from __future__ import annotations

from gorgo.picker.envoy.types import Json, typed

#: Namespace of the counts in Envoy's dynamic metadata: the access log has it.
USAGE = "usage"
#: Bytes of one chunk's end that are retained, more than any event with counts; and least bytes of a retained part.
_CHUNK_BYTES, _PART_BYTES = 8192, 256
_SCRIPT = """\
function envoy_on_response(handle)
  local headers = handle:headers()
  local kind, coding = headers:get("content-type") or "", headers:get("content-encoding")
  local is_stream = kind:find("^text/event%%-stream")
  if coding or not (is_stream or kind:find("^application/json")) then return end
  -- The last four parts: a short one is joined with the next.
  local first, second, third, last = "", "", "", ""
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    if length > 0 then
      local from = length > %(chunk)d and length - %(chunk)d or 0
      local part = chunk:getBytes(from, length - from)
      -- A batch, whose counts the picker sums.
      if not is_stream and last == "" and part:find("^%%s*%%[") then return end
      if #last < %(part)d then last = last .. part else first, second, third, last = second, third, last, part end
    end
  end
  local text = first .. second .. third .. last
  -- A quote within a text of JSON is escaped: no text looks like a key. Without `^` each place would be searched from.
  local usage = text:match('^.*()"usage"%%s*:%%s*{') or 0
  local start = math.max(usage, text:match('^.*()"meta_info"%%s*:%%s*{') or 0)
  if start == 0 then return end
  local found = text:sub(start)
  local function read(name) return tonumber(found:match('"' .. name .. '"%%s*:%%s*(%%d+)')) end
  local prompt = read("prompt_tokens") or read("input_tokens")
  local cached = read("cached_tokens")
  local from_cache = read("cache_read_input_tokens")
  if from_cache then
    -- Anthropic's: beside the input.
    cached = from_cache
    if prompt then prompt = prompt + from_cache + (read("cache_creation_input_tokens") or 0) end
  end
  local metadata = handle:streamInfo():dynamicMetadata()
  local function set(name, value) if value then metadata:set("%(usage)s", name, value) end end
  set("prompt_tokens", prompt)
  set("cached_tokens", cached)
  set("completion_tokens", read("completion_tokens") or read("output_tokens"))
end
"""


def usage_filter() -> Json:
    """Return the filter."""
    script = _SCRIPT % {"chunk": _CHUNK_BYTES, "part": _PART_BYTES, "usage": USAGE}
    config = typed("filters.http.lua.v3.Lua", default_source_code={"inline_string": script})
    return {"name": "envoy.filters.http.lua", "typed_config": config}
