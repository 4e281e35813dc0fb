// An answer under way. It belongs to the message it fills, whatever the page shows meanwhile.
import { answerEvents } from "/chat/api.js";
import { Refused, UNREACHABLE } from "/chat/http.js";
import { asRequest } from "/chat/conversation.js";

const KEEP_EVERY_MS = 1000, MAX_CALLS = 128;
export const STOPPED = "stopped";

export class Answer {
  // `changed(answer)` is called for each event, `options` are fields of the request.
  constructor(conversation, message, options, changed) {
    Object.assign(this, { conversation, message, options, changed });
    this.controller = new AbortController();
    this.begun = message.text; // what a continued answer says already
    this.keptAt = performance.now();
    this.firstAt = this.usage = null;
  }

  stop() { this.controller.abort(); }

  body() {
    const path = this.conversation.pathTo(this.message), isGoingOn = this.begun !== "";
    return {
      ...this.options, stream: true, stream_options: { include_usage: true }, stemma: { explain: true },
      messages: asRequest(this.conversation.head.system, isGoingOn ? path : path.slice(0, -1)),
      ...(isGoingOn ? { continue_final_message: true, add_generation_prompt: false } : {}),
    };
  }

  async run() {
    const { message } = this, askedAt = performance.now();
    try {
      for await (const event of answerEvents(this.body(), this.controller.signal)) {
        this.take(event);
        this.changed(this);
        this.keepNowAndThen();
      }
      message.finish ??= "stop";
    } catch (error) { this.fail(error); }
    if (this.firstAt !== null) {
      message.firstTokenS = (this.firstAt - askedAt) / 1000;
      message.seconds = (performance.now() - this.firstAt) / 1000;
    }
    await this.conversation.keepMessage(message);
  }

  take(event) {
    const { message } = this, choice = event.choices?.[0], delta = choice?.delta ?? {};
    message.answerId = event.id ?? message.answerId;
    message.model = event.model ?? message.model;
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "", said = delta.content ?? "";
    if (this.firstAt === null && (reasoning || said || delta.tool_calls?.length)) this.firstAt = performance.now();
    message.text += said;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (event.usage) message.usage = event.usage;
  }

  takeCall({ index = 0, id, function: called = {} }) {
    const calls = (this.message.calls ??= []);
    if (!Number.isInteger(index) || index < 0 || index >= MAX_CALLS) return;
    while (calls.length <= index) calls.push({ id: "", type: "function", function: { name: "", arguments: "" } });
    const call = calls[index];
    call.id = id ?? call.id;
    call.function.name += called.name ?? "";
    call.function.arguments += called.arguments ?? "";
  }

  fail(error) {
    const { message } = this;
    message.finish = error.name === "AbortError" ? STOPPED : "failed";
    if (message.finish === STOPPED) return;
    this.error = error;
    const isBroken = error instanceof TypeError; // fetch's, which says no more
    const broken = message.text ? "the connection broke: the answer isn't whole" : UNREACHABLE;
    message.failure = isBroken ? broken : error.message;
    if (!isBroken && !(error instanceof Refused)) console.error(error);
  }

  keepNowAndThen() {
    if (performance.now() - this.keptAt < KEEP_EVERY_MS) return;
    this.keptAt = performance.now();
    this.conversation.keepMessage(this.message);
  }
}
