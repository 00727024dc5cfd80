"""The gateway: OpenAI HTTP in, rorqual.v1 out. It never tokenises, templates or parses model text."""
