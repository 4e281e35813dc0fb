// Swagger UI over this server's own description; validatorUrl would send it elsewhere.
window.SwaggerUIBundle({
  url: "/openapi.json", domNode: document.getElementById("api"), deepLinking: true, validatorUrl: null,
  docExpansion: "list", defaultModelsExpandDepth: 0, persistAuthorization: false,
});
