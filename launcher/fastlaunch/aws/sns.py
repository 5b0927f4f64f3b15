"""Messages to a topic of SNS."""

from fastlaunch.aws.session import AwsSession


class SnsCalls(AwsSession):
    def publish(self, topic: str, message: str) -> None:
        """Send a line to the topic, an ARN (sns:Publish)."""
        region = topic.split(":")[3]
        self.call("sns", region, "Publish", subject=topic, TopicArn=topic, Message=message)
