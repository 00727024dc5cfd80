"""Anthropic's Messages API: its bodies as chats, and its answers, events and errors."""
