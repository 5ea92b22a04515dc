"""One child process: how it is started, listened to, and ended."""
