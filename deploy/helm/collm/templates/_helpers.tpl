{{- define "collm.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of one component: (list root component). */}}
{{- define "collm.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "collm.labels" -}}
{{- $root := index . 0 -}}
{{ include "collm.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: collm
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "collm.metadata" -}}
name: {{ include "collm.name" (index . 0) }}-{{ index . 1 }}
labels: {{- include "collm.labels" . | nindent 2 }}
{{- end -}}

{{/* One of the images that docker-compose.yml builds: (list root name). */}}
{{- define "collm.image" -}}
{{- $root := index . 0 -}}
image: {{ with $root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ index . 1 }}:{{ $root.Values.image.tag }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- end -}}

{{- define "collm.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What every pod has: (list root component user scheduling).
Service links would put COLLM_… variables into the environment, which services refuse as unknown settings. */}}
{{- define "collm.pod" -}}
{{- $root := index . 0 -}}
{{- $placed := index . 3 -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ index . 2 }}
  runAsGroup: {{ index . 2 }}
  fsGroup: {{ index . 2 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with $placed.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $placed.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
{{- if $placed.affinity }}
  {{- toYaml $placed.affinity | nindent 2 }}
{{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 50
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "collm.selector" (list $root (index . 1)) | nindent 14 }}
{{- end }}
{{- end -}}

{{- define "collm.podMetadata" -}}
labels: {{- include "collm.labels" (list (index . 0) (index . 1)) | nindent 2 }}
{{- with (index . 2).podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "collm.redisSecret" -}}
{{- .Values.redis.passwordSecret | default (printf "%s-redis" (include "collm.name" .)) -}}
{{- end -}}

{{/* The broker as one service sees it: (list root user). */}}
{{- define "collm.redisEnv" -}}
{{- $root := index . 0 -}}
{{- $redis := $root.Values.redis -}}
{{- $user := $redis.enabled | ternary "" $redis.external.username | default (index . 1) -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "collm.redisSecret" $root }}, key: {{ index . 1 }}}
{{- if $redis.enabled }}
- name: COLLM_REDIS_URL
  value: redis://{{ $user }}:$(REDIS_PASSWORD)@{{ include "collm.name" $root }}-redis:6379/0
{{- else }}
{{- $outside := $redis.external }}
{{- $watched := $outside.sentinel }}
{{- if $watched.login }}
- name: SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "collm.redisSecret" $root }}, key: sentinel}
{{- end }}
{{- $login := printf "%s:$(REDIS_PASSWORD)" $user }}
- name: COLLM_REDIS_URL
{{- if $watched.nodes }}
  value: redis+sentinel://{{ $login }}@{{ join "," $watched.nodes }}/{{ $watched.name }}/{{ $outside.database }}{{ if $watched.login }}?password=$(SENTINEL_PASSWORD){{ end }}
{{- else }}
  value: {{ $outside.tls | ternary "rediss" "redis" }}://{{ $login }}@{{ $outside.host }}:{{ $outside.port }}/{{ $outside.database }}{{ if $outside.caSecret }}?ssl_ca_certs=/etc/collm-ca/ca.crt{{ end }}
{{- end }}
- name: COLLM_KEY_PREFIX
  value: {{ $outside.keyPrefix | quote }}
{{- end }}
- name: COLLM_LOG_LEVEL
  value: {{ $root.Values.logLevel }}
{{- end -}}

{{/* Volumes that every service has, and where they are mounted: (list root limit-of-tmp). */}}
{{- define "collm.volumes" -}}
{{- $redis := (index . 0).Values.redis -}}
- name: tmp
  emptyDir: {sizeLimit: {{ index . 1 }}}
{{- if and (not $redis.enabled) $redis.external.caSecret }}
- name: broker-ca
  secret: {secretName: {{ $redis.external.caSecret }}}
{{- end }}
{{- end -}}

{{- define "collm.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if and (not .Values.redis.enabled) .Values.redis.external.caSecret }}
- {name: broker-ca, mountPath: /etc/collm-ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* Settings by their names: (list SERVICE settings). */}}
{{- define "collm.settingsEnv" -}}
{{- $service := index . 0 -}}
{{- range $name, $value := index . 1 }}
- name: COLLM_{{ $service }}_{{ upper $name }}
  value: {{ (kindIs "string" $value | ternary $value (toJson $value)) | quote }}
{{- end }}
{{- end -}}

{{- define "collm.extraEnv" -}}
{{- range .extraEnv }}
{{- if hasPrefix "COLLM_" .name }}
{{- fail (printf "extraEnv: %s is a setting of CoLLM: name it in `settings`, without its prefix and in small letters" .name) }}
{{- end }}
{{- end }}
{{- with .extraEnv }}{{ toYaml . }}{{ end }}
{{- end -}}

{{- define "collm.hubEnv" -}}
{{- with .Values.model.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: token}
{{- end }}
{{- end -}}

{{/* Makes the model ready in the volume `models`. */}}
{{- define "collm.prepare" -}}
name: model
{{ include "collm.image" (list . "collm-model") }}
args: [{{ .Values.model.source | quote }}, /models]
{{- with include "collm.hubEnv" . }}
env: {{- . | nindent 2 }}
{{- end }}
{{- with .Values.model.resources }}
resources: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- include "collm.security" . | nindent 2 }}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: tmp, mountPath: /tmp}
{{- end -}}

{{/* The volume `models`: a shared claim that a job fills, or a pod's own, which its first container fills. */}}
{{- define "collm.models" -}}
- name: models
{{- if .Values.model.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.size }}}
{{- end }}
{{- end -}}

{{/* Where the dispatcher finds the tokenizer; a hub name spares it the weights. */}}
{{- define "collm.tokenizer" -}}
{{- if .Values.dispatcher.tokenizer -}}
{{- .Values.dispatcher.tokenizer -}}
{{- else if or .Values.model.claim (hasPrefix "/" .Values.model.source) -}}
/models/served
{{- else -}}
{{- .Values.model.source -}}
{{- end -}}
{{- end -}}

{{/* Whether a lease is held, unless the broker cannot say: (list lease forgiving). */}}
{{- define "collm.leaseProbe" -}}
exec:
  command: [python3, -m, collm_common.probe, lease, {{ index . 0 | quote }}{{ if index . 1 }}, --unless-away{{ end }}]
timeoutSeconds: 10
{{- end -}}
