"""A server over one engine that speaks OpenAI's API: `minillm serve`. Begin with `engine_thread.py`, then `app.py`.

Starlette and uvicorn speak HTTP, prometheus-client writes /metrics: `pip install -e '.[serve]'`.
"""
