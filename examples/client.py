"""Stream one answer through the proxy, print the replica that gave it, and wait as a rejection says."""

import os
import time

from openai import APIStatusError, OpenAI

client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key=os.environ.get("GORGO_API_KEY", "unused"), max_retries=0)
for _ in range(3):
    try:
        answer = client.chat.completions.with_raw_response.create(
            model="gorgo-sim",
            messages=[{"role": "user", "content": "Where does this request go?"}],
            max_tokens=8,
            stream=True,
            extra_headers={"x-slo-ttft-ms": "3000"},
        )
    except APIStatusError as rejection:
        wait_s = float(rejection.response.headers.get("retry-after", "1"))
        print(f"{rejection.status_code}: {rejection.message}; next try in {wait_s:g} s")
        time.sleep(wait_s)
        continue
    print("replica", answer.headers["x-gorgo-replica"], "in", answer.headers["x-gorgo-region"])
    for chunk in answer.parse():
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    break
