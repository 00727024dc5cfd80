"""OpenAI's HTTP dialect: request bodies, answers and stream chunks."""
