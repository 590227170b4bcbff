"""OpenAI's Responses API: requests as chats, answers as output items and events, and the store."""
