"""Files of requests that are answered when there is room, as OpenAI's API has them."""
