"""Envoy's filter that reads the engine's counts of tokens: a Lua script over the end of each answer.

It is called with each chunk and does nothing but to retain the last ones; once an answer has ended, the last object
under a key of counts is searched for them. Envoy's own `sse_to_metadata` parses the JSON of each event instead, and
takes longer.
"""

from __future__ import annotations

from gorgo.picker.envoy.types import Json, typed

#: Namespace of the counts in Envoy's dynamic metadata: the access log has it.
USAGE = "usage"
#: Bytes of an answer's end that are searched; up to three times as many are retained, and the last chunk.
_TAIL_BYTES = 8192
_SCRIPT = """\
function envoy_on_response(handle)
  local headers = handle:headers()
  local kind, coding = headers:get("content-type") or "", headers:get("content-encoding")
  local is_stream = kind:find("^text/event%%-stream")
  if coding or not (is_stream or kind:find("^application/json")) then return end
  -- Two halves: the older one is dropped once the newer one is long enough.
  local older, newer, count, size = {}, {}, 0, 0
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    if length > 0 then
      if size > %(bytes)d then older, newer, count, size = newer, {}, 0, 0 end
      local from = length > %(bytes)d and length - %(bytes)d or 0
      count, size = count + 1, size + length
      newer[count] = chunk:getBytes(from, length - from)
      -- A batch, whose counts the picker sums.
      if not is_stream and count == 1 and newer[1]:find("^%%s*%%[") then return end
    end
  end
  local text = (table.concat(older) .. table.concat(newer)):sub(-%(bytes)d)
  -- A quote within a text of JSON is escaped: no text looks like a key.
  local usage = text:match('.*()"usage"%%s*:%%s*{') or 0
  local start = math.max(usage, text:match('.*()"meta_info"%%s*:%%s*{') or 0)
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
    script = _SCRIPT % {"bytes": _TAIL_BYTES, "usage": USAGE}
    config = typed("filters.http.lua.v3.Lua", default_source_code={"inline_string": script})
    return {"name": "envoy.filters.http.lua", "typed_config": config}
