"""What every folder may use: messages, tables, progress, environment. Imports nothing of ours, knows no tensor."""
