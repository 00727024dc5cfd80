"""The DeepSeek model: configuration, the flat batch it computes, its layers."""
